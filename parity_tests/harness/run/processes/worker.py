"""The main loop of a pool's rank.

Two sockets lead to the parent. Jobs and outcomes travel on the first. On the second a thread of its own answers
what has been issued so far, also while the main thread hangs, and ends the process when the parent is gone.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from parity_tests.harness.run.processes import status_table
from parity_tests.harness.run.processes.rank import Rank, observe, rows_so_far


def main(work_fd: int, control_fd: int, *, rank: int, world: int, backend: str, folder: str) -> None:
    work = Connection(work_fd)
    threading.Thread(target=_answer, args=(Connection(control_fd),), daemon=True).start()
    observe()
    slot = status_table.Board(Path(folder) / "board", world).slot(rank)
    member = Rank(slot, backend, dist.FileStore(str(Path(folder) / "store"), world), rank, world, gpu=rank)
    try:
        while True:
            work.send(member.run(work.recv(), ready=lambda: work.send("ready")))
    except (EOFError, ConnectionError):
        return  # the parent has let go


def _answer(control: Connection) -> None:
    """Answer each question with the rows issued so far; leave without a word when the parent does."""
    while True:
        try:
            question = control.recv()
            control.send((question, rows_so_far()))
        except (EOFError, OSError):
            os._exit(0)
