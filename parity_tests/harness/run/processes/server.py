"""The fork server: a small process, warm with torch, that forks one rank per request and reaps it.

It holds one socket to the parent: a line of JSON per message, and with each fork request the rank's two sockets.
It reports each rank's end, kills on request, and when the parent's end of the socket closes, however the parent
ended, it kills every rank, removes the pool's folder and leaves.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from selectors import EVENT_READ, DefaultSelector
from typing import NoReturn


def main(parent: socket.socket, folder: str) -> NoReturn:
    from parity_tests.harness.run.processes import preload

    preload.warm()
    gc.collect()
    gc.freeze()  # ranks share these pages, and their collector has nothing to look for there
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: set[int] = set()
    _tell(parent, {"up": os.getpid()})
    with DefaultSelector() as selector:
        selector.register(parent, EVENT_READ)
        selector.register(woken, EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 4096)
                _reap(parent, ranks)
            if parent in ready and not _serve(parent, ranks, (woken, wake)):
                break
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    for pid in ranks:
        os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # the interpreter's own end takes a third of a second


def _serve(parent: socket.socket, ranks: set[int], own: tuple[int, int]) -> bool:
    """Answer what the parent has sent; False at its end."""
    try:
        data, fds, _, _ = socket.recv_fds(parent, 65536, 2)
        while data and not data.endswith(b"\n"):
            more = parent.recv(65536)
            if not more:
                return False  # it ended in the middle of a line
            data += more
    except ConnectionError:
        return False
    for line in data.splitlines():
        request = json.loads(line)
        if "fork" in request:
            pid = os.fork()
            if pid == 0:
                _become_rank(request["fork"], fds, parent, own)
            for fd in fds:
                os.close(fd)
            ranks.add(pid)
            _tell(parent, {"forked": pid})
        for pid in ranks.intersection(request.get("kill", ())):
            os.kill(pid, signal.SIGKILL)
    return bool(data)


def _become_rank(place: dict, fds: list[int], parent: socket.socket, own: tuple[int, int]) -> NoReturn:
    """In the child: drop the server's belongings and run the rank to its end."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        parent.close()
        for fd in own:
            os.close(fd)
        from parity_tests.harness.run.processes import worker

        worker.main(*fds, **place)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(parent: socket.socket, ranks: set[int]) -> None:
    for pid in list(ranks):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            ranks.discard(pid)
            _tell(parent, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _tell(parent: socket.socket, message: dict) -> None:
    with contextlib.suppress(ConnectionError):  # the parent has gone; the next read says so
        parent.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
