"""Kinds of failure: one rank of a small function does something that the others do not.

Each is called as `body(mesh, case)`, with one axis `tp`; rank 1 is the odd one where there is one.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

HANGS_S = 30.0  # longer than the quiet that an engine allows; an abandoned thread of lockstep ends by itself


def raises(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        raise KeyError("no such weight")
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def raises_in_the_backward(mesh: Any, case: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    if mesh.rank("tp") == 1:
        y.register_hook(lambda gradient: gradient @ torch.ones(5))
    y.sum().backward()
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def exits_with_0(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        sys.exit(0)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def leaves_by_os_exit(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def is_killed(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def segmentation_fault(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def aborts(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        os.abort()
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def loops(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    end = time.monotonic() + HANGS_S
    while mesh.rank("tp") == 1 and time.monotonic() < end:
        pass
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def sleeps(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    if mesh.rank("tp") == 1:
        time.sleep(HANGS_S)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def hangs_in_c(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    if mesh.rank("tp") == 1:
        ctypes.CDLL(None).sleep(int(HANGS_S))
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def holds_the_interpreter(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    if mesh.rank("tp") == 1:
        re.match("(a+)+$", "a" * 60 + "b")  # longer than anyone waits, and no other thread gets a turn
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def is_stopped(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    if mesh.rank("tp") == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(HANGS_S)  # it is continued before it is killed, and must not go on
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def leaves_in_a_thread(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        thread = threading.Thread(target=lambda: os._exit(0))
        thread.start()
        thread.join()
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def raises_from_itself(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        error = KeyError("no such weight")
        raise error from error
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def message_raises(mesh: Any, case: Any) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise SystemExit

    if mesh.rank("tp") == 1:
        raise Silent
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def message_is_unprintable(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        raise ValueError("\ud800 \x1b[31m \x00 \u202e")
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def other_shape(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(2 if mesh.rank("tp") == 1 else 3), group=mesh["tp"])


def other_dtype(mesh: Any, case: Any) -> None:
    dtype = torch.int32 if mesh.rank("tp") == 1 else torch.float32
    dist.all_reduce(torch.ones(3, dtype=dtype), group=mesh["tp"])


def other_item_size(mesh: Any, case: Any) -> None:
    dtype = torch.int64 if mesh.rank("tp") == 1 else torch.float32
    dist.all_reduce(torch.ones(3, dtype=dtype), group=mesh["tp"])


def other_operation(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.broadcast(torch.ones(3), group_src=0, group=mesh["tp"])
    else:
        dist.all_reduce(torch.ones(3), group=mesh["tp"])


def other_reduce_op(mesh: Any, case: Any) -> None:
    op = dist.ReduceOp.MAX if mesh.rank("tp") == 1 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(3), op=op, group=mesh["tp"])


def other_group(mesh: Any, case: Any) -> None:
    inner = dist.new_group(list(range(mesh.size("tp"))))
    dist.all_reduce(torch.ones(3), group=mesh["tp"] if mesh.rank("tp") == 1 else inner)


def other_root(mesh: Any, case: Any) -> None:
    dist.broadcast(torch.ones(3), group_src=mesh.rank("tp") % 2, group=mesh["tp"])


def collective_missing(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    if mesh.rank("tp") != 1:
        dist.all_reduce(torch.ones(5), group=mesh["tp"])


def collective_too_many(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    if mesh.rank("tp") == 1:
        dist.all_reduce(torch.ones(5), group=mesh["tp"])


def other_order(mesh: Any, case: Any) -> None:
    for size in (5, 3) if mesh.rank("tp") == 1 else (3, 5):
        dist.all_reduce(torch.ones(size), group=mesh["tp"])


def not_contiguous(mesh: Any, case: Any) -> None:
    x = torch.ones(3, 3)
    dist.all_reduce(x[:, ::2] if mesh.rank("tp") == 1 else x[:, :2].clone(), group=mesh["tp"])


def never_waits(mesh: Any, case: Any) -> None:
    torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", mesh["tp"].group_name)


def wrong_counts(mesh: Any, case: Any) -> None:
    world = mesh.size("tp")
    received = [1] * (world - 1) + [2 if mesh.rank("tp") == 1 else 1]
    dist.all_to_all_single(torch.empty(sum(received), 2), torch.ones(world, 2), received, group=mesh["tp"])


def send_without_recv(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.send(torch.ones(4), group_dst=0, group=mesh["tp"])


def recv_without_send(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.recv(torch.ones(4), group_src=0, group=mesh["tp"])


def all_send_first(mesh: Any, case: Any) -> None:
    rank, world = mesh.rank("tp"), mesh.size("tp")
    dist.send(torch.ones(4), group_dst=(rank + 1) % world, group=mesh["tp"])
    dist.recv(torch.ones(4), group_src=(rank - 1) % world, group=mesh["tp"])


def prints_much(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        os.write(2, bytes(range(256)) * 4)
        os.write(1, b"{not json" * 1000)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def forks_a_child(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1 and os.fork() == 0:
        time.sleep(HANGS_S)
        os._exit(0)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def returns_a_lock(mesh: Any, case: Any) -> Any:
    import threading

    dist.all_reduce(torch.ones(3), group=mesh["tp"])
    return threading.Lock() if mesh.rank("tp") == 1 else None
