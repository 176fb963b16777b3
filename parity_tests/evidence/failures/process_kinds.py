"""Kinds of failure of a rank's process, its threads and its children."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

SESSION = "import os, time; os.setsid(); os.write(1, b'1'); time.sleep(60)"


def exits_with_a_message(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        sys.exit("nothing to train")
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def raises_keyboard_interrupt(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        raise KeyboardInterrupt
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def raises_a_group(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        raise ExceptionGroup("two layers", [KeyError("no such weight"), ValueError("no such size")])
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def raises_while_another_receives(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        raise KeyError("no such weight")
    if mesh.rank("tp") == 0:
        dist.recv(torch.empty(4), group_src=1, group=mesh["tp"])


def recurses_for_ever(mesh: Any, case: Any) -> None:
    def again(depth: int) -> int:
        return again(depth + 1)

    if mesh.rank("tp") == 1:
        again(0)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def asks_for_too_much_memory(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        torch.empty(1 << 50)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def replaces_the_process(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        os.execv(sys.executable, [sys.executable, "-c", "pass"])
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def killed_by_sigbus(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        signal.pthread_kill(threading.get_ident(), signal.SIGBUS)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def killed_by_sigalrm(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        signal.alarm(1)
        threading.Event().wait()
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def killed_by_a_real_time_signal(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        os.kill(os.getpid(), signal.SIGRTMIN + 6)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def dies_in_a_thread(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        thread = threading.Thread(target=lambda: ctypes.string_at(0))
        thread.start()
        thread.join()
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def raises_in_a_thread(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        weights: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: weights["no such weight"])
        thread.start()
        thread.join()
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def stops_in_a_thread(mesh: Any, case: Any) -> None:
    class Stop(BaseException):
        """As asyncio's and pytest's, which are no Exception."""

    def stops() -> None:
        raise Stop

    if mesh.rank("tp") == 1:
        thread = threading.Thread(target=stops)
        thread.start()
        thread.join()
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def communicates_in_a_thread(mesh: Any, case: Any) -> None:
    size = 2 if mesh.rank("tp") == 1 else 3
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(size), group=mesh["tp"]))
    thread.start()
    thread.join()


def waits_for_a_lock_for_ever(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    if mesh.rank("tp") == 1:
        threading.Event().wait()
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def child_with_a_session_of_its_own(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        child = subprocess.Popen([sys.executable, "-c", SESSION], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.read(1)
        raise KeyError("no such weight")
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
