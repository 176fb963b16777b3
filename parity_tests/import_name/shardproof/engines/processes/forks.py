"""The parent's side of the fork server: start it, request ranks, learn of their ends, have them killed."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from shardproof.places import SEARCHED

START_S = 120.0  # importing torch from a cold disk
KILL_S = 5.0
GONE = "engines.pool: the process that forks the ranks has ended, and the ranks with it; run again"


# Packages that ranks may need, that are slow to import and start no thread when imported.
SHARED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch_impl",
    "transformers",
)
READ_BY_JAX = ("JAX_", "TF_CPP_", "TPU_", "XLA_")  # environment variables
JAX = ("jax", "jax.numpy")  # which start no thread before their first use


class ServerGone(RuntimeError):
    """The fork server has ended: it was killed from outside, or the machine ran out of memory."""


class ForkServer:
    """A fork server, which imports torch first. It creates `folder` for the pools and removes it at its end."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self.environment = _environment()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "shardproof.engines.processes.server",
                str(theirs.fileno()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the parent handles an interrupt at the terminal
            env=self.environment,
        )
        # The server reads nothing while it imports torch. Until then the kernel ends it with SIGIO when this process
        # ends.
        fcntl.fcntl(theirs, fcntl.F_SETOWN, self._process.pid)
        fcntl.fcntl(theirs, fcntl.F_SETFL, fcntl.fcntl(theirs, fcntl.F_GETFL) | os.O_ASYNC)
        theirs.close()
        self._unread = b""
        self._is_inherited = False
        self._used_by_fork = mmap.mmap(-1, 1)  # shared with the forks of this process
        self._ended: dict[int, int] = {}
        self._imported: set[str] = set()

    @functools.cached_property
    def folder(self) -> str:
        """The folder of the pools' files; waits until the server is up."""
        return self._await("up", START_S)["folder"]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        # A fork of the parent cannot ask; a server that has ended shows at the next message.
        return self._is_inherited or self._process.poll() is None

    @property
    def is_used(self) -> bool:
        """Whether a fork of this process has used it."""
        return bool(self._used_by_fork[0])

    @property
    def is_up(self) -> bool:
        """Whether it is known to have imported its packages."""
        return "folder" in vars(self)

    def notice(self) -> None:
        """Learn whether it is up, without waiting."""
        for message in () if self.is_up else self.read():
            if "up" in message:
                vars(self)["folder"] = message["folder"]

    def inherit(self) -> None:
        """In a fork of the parent, which may use this server in its place, as the only one."""
        self._is_inherited = True
        self._process.returncode = 0  # the parent waits for it

    def use(self) -> None:
        """Before the first request: the parent gives a server that its fork has used to no other fork."""
        if self._is_inherited:
            self._used_by_fork[0] = 1

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, **place: Any) -> tuple[int, Connection, Connection]:
        """Fork a new rank: its pid, and this side's ends of its work and control sockets."""
        pairs = [socket.socketpair() for _ in range(2)]
        try:
            theirs = [theirs.fileno() for _, theirs in pairs]
            with _ends_as_gone():
                socket.send_fds(self._socket, [_line({"fork": place})], theirs)
        finally:
            for _, theirs in pairs:
                theirs.close()
        pid = self._await("forked", START_S)["forked"]
        work, control = (Connection(ours.detach()) for ours, _ in pairs)
        return pid, work, control

    def import_ahead(self, packages: frozenset[str]) -> None:
        """Import these `shared_packages` in the server, so that ranks forked later have them."""
        # Import the modules of each package that this process has; torch._dynamo and JAX import theirs themselves.
        inside = tuple(f"{package}." for package in packages - {"torch._dynamo", *JAX})
        names = [name for name in list(sys.modules) if name.startswith(inside)]
        names = [name for name in dict.fromkeys([*packages, *names]) if name not in self._imported]
        if names:
            origins = {name: _origin(name) for name in {name.partition(".")[0] for name in packages}}
            with _ends_as_gone():
                self._socket.sendall(_line({"import": names, "origins": origins}))
            self._await("imported", START_S)
            self._imported.update(names)

    def takes(self, environment: Mapping[str, str]) -> bool:
        """Update the server's environment to this one if only JAX reads the differences; False if it cannot."""
        names = {name for name, _ in environment.items() ^ self.environment.items()}
        if not all(name.startswith(READ_BY_JAX) for name in names):
            return False
        _ = self.folder  # the signal would end a server that still imports torch
        with _ends_as_gone():
            self._socket.sendall(_line({"environment": {name: environment.get(name) for name in names}}))
        self.environment = dict(environment)
        return True

    def exit_code(self, pid: int, timeout: float = 0.0) -> int | None:
        """Exit code of an ended rank, -N for signal N; None while it runs."""
        deadline = time.monotonic() + timeout
        while pid not in self._ended and self.read(max(0.0, deadline - time.monotonic())):
            pass
        return self._ended.get(pid)

    def kill(self, pids: Collection[int]) -> None:
        """Kill these ranks and wait until they are gone."""
        alive = [pid for pid in pids if pid not in self._ended]
        try:
            self._socket.sendall(_line({"kill": alive}))
            for pid in alive:
                self.exit_code(pid, KILL_S)
        except (OSError, ServerGone):
            pass  # without a server the ranks end when their sockets close
        for pid in pids:
            self._ended.pop(pid, None)

    def suspend(self, pids: Collection[int]) -> None:
        """Stop these ranks until they are resumed or killed."""
        self._request("suspend", pids)

    def resume(self, pids: Collection[int]) -> None:
        """Let suspended ranks go on."""
        self._request("resume", pids)

    def _request(self, what: str, pids: Collection[int]) -> None:
        with contextlib.suppress(OSError):  # the server has ended; the next user of the ranks will see it
            self._socket.sendall(_line({what: list(pids)}))

    def close(self) -> None:
        """End the server, all its ranks and the folder."""
        if self.is_used or not self._is_inherited:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # also where another process holds the socket too
        self._socket.close()
        if self._is_inherited:
            return
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """In a forked child of the parent: close the socket, which would tell the server that the parent is alive."""
        self._socket.close()
        self._process.returncode = 0

    def _await(self, key: str, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for message in self.read(deadline - time.monotonic()):
                if key in message:
                    return message
        raise ServerGone(f"engines.pool: the fork server did not answer within {timeout:.0f} s")

    def read(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Pending messages; notes the ends of ranks on the way."""
        if not select.select([self._socket], [], [], timeout)[0]:
            return []
        data = self._socket.recv(65536)
        if not data:
            raise ServerGone(GONE)
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        self._ended |= {m["ended"]: m["status"] for m in messages if "ended" in m}
        return messages


_ahead: ForkServer | None = None
_is_for_forks = False  # the server ahead is for the next fork of this process, not for this process


def start_ahead() -> None:
    """Start a server that imports torch while this process imports JAX; the first pool takes it."""
    global _ahead
    if _ahead is None:
        _ahead = ForkServer()


def start_ahead_of_forks() -> None:
    """Start a server for the forks of this process, or a fresh one if a fork has used the last one.

    A fork takes it if it is up and the fork needs ranks. One fork may run at a time.
    """
    global _ahead, _is_for_forks
    _is_for_forks = True
    if _ahead is not None and (_ahead.is_used or not _ahead.is_alive):
        _ahead.close()
        _ahead = None
    start_ahead()


def server() -> ForkServer:
    """A running server: the one started ahead, or a new one.

    A user's file may set environment variables, which packages read at import: the server has read torch's when it
    started, and none of JAX's.
    """
    global _ahead
    taken, _ahead = _ahead, None
    if taken is not None:
        taken.use()
    if taken is not None and not (taken.is_alive and taken.takes(_environment())):
        taken.close()
        taken = None
    taken = taken or ForkServer()
    _ = taken.folder
    return taken


def _drop_ahead(end: Callable[[ForkServer], None]) -> None:
    global _ahead
    dropped, _ahead = _ahead, None
    if dropped is not None:
        end(dropped)


def _before_fork() -> None:
    if _is_for_forks and _ahead is not None:
        with contextlib.suppress(ServerGone, OSError):
            _ahead.notice()


def _after_fork() -> None:
    global _is_for_forks
    is_for_this, _is_for_forks = _is_for_forks, False
    if is_for_this and _ahead is not None and _ahead.is_up and not _ahead.is_used:
        _ahead.inherit()
    else:
        _drop_ahead(ForkServer.forget)


atexit.register(_drop_ahead, ForkServer.close)
os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def shared_packages(imports: Collection[str] = ()) -> frozenset[str]:
    """Packages of `SHARED` in this process, imports of a DTensor's first call, and JAX if `imports` names it."""
    packages = {name for name in SHARED if sys.modules.get(name) is not None}
    if "torch.distributed.tensor" in packages:
        packages.add("torch._dynamo")
    if any(name.partition(".")[0] == "jax" for name in imports):
        packages.update(JAX)
    return frozenset(packages)


def _origin(package: str) -> str | None:
    return getattr(sys.modules.get(package), "__file__", None)


@contextlib.contextmanager
def _ends_as_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ServerGone(GONE) from error


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _environment() -> dict[str, str]:
    """This process's environment, with this package importable, one thread, and gloo on loopback.

    On loopback no port is open to other hosts.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    path = os.pathsep.join([*SEARCHED, *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    devices = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback)
    # Files that ranks import may create JAX arrays, which are float64 in the parent. Packages that look for a GPU at
    # import must not initialize CUDA, because no forked process could use it.
    own = {"PYTHONPATH": path, "JAX_ENABLE_X64": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    defaults = {"JAX_PLATFORMS": "cpu", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return defaults | os.environ | own | threads | devices
