"""The fork server: a small process that has imported torch, forks one rank per request and reaps it.

It holds one socket to the parent: one line of JSON per message, and with each fork request the rank's two sockets. It
reports the end of each rank, and suspends, resumes and kills ranks on request; when the parent's end of the socket
closes, for any reason, it kills every rank, removes the pools' folder and exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from selectors import EVENT_READ, DefaultSelector
from typing import NoReturn

import cloudpickle
import torch

from shardproof.engines.collector import freeze_heap
from shardproof.engines.processes.rank_warnings import not_shown

SIGNALS = {"suspend": signal.SIGSTOP, "resume": signal.SIGCONT}


def main(parent: socket.socket) -> NoReturn:
    warm()
    fcntl.fcntl(parent, fcntl.F_SETFL, fcntl.fcntl(parent, fcntl.F_GETFL) & ~os.O_ASYNC)  # see ForkServer
    folder = tempfile.mkdtemp(prefix="shardproof_")
    freeze_heap()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: set[int] = set()
    _tell(parent, {"up": os.getpid(), "folder": folder})
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
        _kill_group(pid)
    for pid in ranks:
        os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # a normal exit of the interpreter takes a third of a second


def _serve(parent: socket.socket, ranks: set[int], wake_fds: tuple[int, int]) -> bool:
    """Answer the parent's requests; False once it has ended."""
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
                _become_rank(request["fork"], fds, parent, wake_fds)
            os.setpgid(pid, pid)
            for fd in fds:
                os.close(fd)
            ranks.add(pid)
            _tell(parent, {"forked": pid})
        for name, value in request.get("environment", {}).items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if "import" in request:
            _import(request["import"], request["origins"])
            freeze_heap()
            _tell(parent, {"imported": len(request["import"])})
        for pid in ranks.intersection(request.get("kill", ())):
            _kill_group(pid)
        for what, number in SIGNALS.items():
            for pid in ranks.intersection(request.get(what, ())):
                os.kill(pid, number)  # not reaped yet, so no other process has its number
    return bool(data)


def _import(names: Sequence[str], origins: Mapping[str, str | None]) -> None:
    """Import modules of the parent, if their package resolves to the same file here."""
    packages = {package for package, origin in origins.items() if origin and _origin(package) == origin}
    for name in names:
        if name.partition(".")[0] in packages and name not in sys.modules:
            with contextlib.suppress(Exception), not_shown():  # created by the parent, or not importable alone
                importlib.import_module(name)


def _origin(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _become_rank(place: dict, fds: list[int], parent: socket.socket, wake_fds: tuple[int, int]) -> NoReturn:
    """In the child: drop the server's resources and run the rank to its end."""
    code = 1
    try:
        os.setpgid(0, 0)  # the leader of its own process group, which is killed with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # end it if the server is killed, under nohup too
        parent.close()
        for fd in wake_fds:
            os.close(fd)
        from shardproof.engines.processes import rank

        rank.main(*fds, **place)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(parent: socket.socket, ranks: set[int]) -> None:
    for pid in list(ranks):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _kill_group(pid)  # before its number can be reused
        _, status = os.waitpid(pid, 0)
        ranks.discard(pid)
        _tell(parent, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _kill_group(rank: int) -> None:
    """Kill a rank, if it is alive, and the processes that it forked."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # if only zombies are left
        os.killpg(rank, signal.SIGKILL)


def _tell(parent: socket.socket, message: dict) -> None:
    with contextlib.suppress(ConnectionError):  # the parent has gone; the next read reports it
        parent.sendall(json.dumps(message).encode() + b"\n")


# Modules that every rank needs, imported once here so that a rank is a fork and not a fresh start; further packages
# come with `import_ahead`. Start no thread and do not initialize CUDA: a forked process could use neither. So
# differentiate nothing here, because torch's autograd counts the GPUs at its first call, which initializes CUDA. The
# server's environment limits torch to one thread before torch is loaded.
NEEDED = (
    "shardproof.engines.processes.rank",
    "shardproof.engines.program",
    "shardproof",
    "torch.distributed.nn.functional",
    "torch.fx.experimental.symbolic_shapes",  # for cotangents that the user passes
    "torch.utils.checkpoint",
    "torch_impl.collectives",
)


def warm() -> None:
    """Import the modules and run first uses that are slow."""
    with not_shown():
        for name in NEEDED:
            importlib.import_module(name)
    torch.set_num_threads(1)
    cloudpickle.loads(cloudpickle.dumps(lambda: None))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
