"""Python processes that need not import torch and JAX: forks of one that has imported them, and nothing of ours.

A command in a process of its own takes four seconds to import the same modules each time. A fork gets a folder, an
environment, arguments, `sys.path` and `__main__` as `python` would, and finds our modules and the modules of its
folder, as a new process does. Tests of imports, signals and terminals start a fresh interpreter instead.

JAX is imported and not used before a fork: its first use starts threads, which do not survive one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 240.0
TORCH = ("numpy", "cloudpickle", "torch", "torch.distributed", "torch.utils.checkpoint")
OF_A_GRADIENT = "torch.fx.experimental.symbolic_shapes"  # torch imports it at the first one
TORCH_AND_JAX = (*TORCH, OF_A_GRADIENT, "typer", "rich.table", "jax", "jax.numpy")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def run(
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    imported: Sequence[str] = TORCH_AND_JAX,
) -> subprocess.CompletedProcess[str]:
    """The result of `subprocess.run([sys.executable, *arguments])`, with its output as text."""
    return together([(arguments, environment or os.environ)], folder or Path.cwd(), imported)[0]


def together(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    folder: Path,
    imported: Sequence[str] = TORCH_AND_JAX,
    limit_s: float = LIMIT_S,
) -> list[subprocess.CompletedProcess[str]]:
    """Several at once, each of arguments and an environment. Errors: TimeoutExpired, once all are killed."""
    origin = _origin(tuple(imported))
    with contextlib.ExitStack() as files:
        # No pipe, which would fill while another one's process is waited for.
        outputs = [[files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        forks = [
            files.enter_context(origin.forked(arguments, folder, environment, [file.fileno() for file in pair]))
            for (arguments, environment), pair in zip(commands, outputs, strict=True)
        ]
        deadline = time.monotonic() + limit_s
        statuses = [fork.status(deadline) for fork in forks]
        for file in (file for pair in outputs for file in pair):
            file.seek(0)
        return [
            subprocess.CompletedProcess([sys.executable, *arguments], status, *(file.read() for file in pair))
            for (arguments, _), status, pair in zip(commands, statuses, outputs, strict=True)
        ]


class Fork:
    """A process that was forked, and ends with the block."""

    def __init__(self, arguments: Sequence[str], answers: int) -> None:
        self._arguments, self._answers = arguments, os.fdopen(answers, "rb", buffering=0)
        self.pid, self._has_ended = self._number(time.monotonic() + LIMIT_S), False

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
        self._answers.close()

    def status(self, deadline: float) -> int:
        """Its status once it has ended, -N for signal N."""
        status = self._number(deadline)
        self._has_ended = True
        return status

    def _number(self, deadline: float) -> int:
        if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise subprocess.TimeoutExpired(list(self._arguments), LIMIT_S)
        return int(self._answers.readline())


class Origin:
    """The process that is forked, by any thread; it ends with this one."""

    def __init__(self, imported: Sequence[str]) -> None:
        from shardproof.engines.processes import orphans  # here: the other side does not import it

        self._lock = threading.Lock()
        self._link, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | THREADS
        with theirs:
            self._process = subprocess.Popen(
                orphans.kept([sys.executable, __file__, str(theirs.fileno()), *imported]),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._link.close()
        self._process.wait()

    def forked(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], files: Sequence[int]
    ) -> Fork:
        request = json.dumps([list(arguments), str(folder), dict(environment)]).encode() + b"\n"
        with self._lock:  # until the fork has begun, so that no two requests arrive as one
            answers, theirs = os.pipe()
            socket.send_fds(self._link, [request], [*files, theirs])
            os.close(theirs)
            return Fork(arguments, answers)


_origin = functools.cache(Origin)


# The other side. This file runs there as a script, and imports nothing of ours.


def forked(link: socket.socket) -> tuple[Any, list[int]]:
    """Fork at each request until there are no more; returns in the forks, with their request and files."""
    while True:
        data, files, _, _ = socket.recv_fds(link, 65536, 3)
        while data and not data.endswith(b"\n"):
            data += link.recv(65536)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # the processes that waited for forks which have ended
                pass
        if not data:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    link.close()
    *files, answers = files
    # This process waits for the one that it forks, and says how that ended.
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        return json.loads(data), files
    for file in files:
        os.close(file)
    os.write(answers, b"%d\n" % pid)
    os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def become(request: Any, files: Sequence[int]) -> None:
    """Be `python ARGUMENTS`: of a file, -c or -m."""
    (what, *rest), folder, environment = request
    for place, file in enumerate(files, 1):
        os.dup2(file, place)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    searched = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = {"-c": "", "-m": folder}.get(what, str(Path(what).resolve().parent))
    sys.path[:1] = [first, *searched]  # in place of this file's folder
    importlib.invalidate_caches()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if what == "-m":
        sys.argv = rest
        runpy._run_module_as_main(rest[0])  # pyright: ignore[reportAttributeAccessIssue]
        return
    sys.argv = [what, *rest[1:]] if what == "-c" else [what, *rest]
    if what != "-c":
        module.__file__ = what
    source = rest[0] if what == "-c" else Path(what).read_text()
    exec(compile(source, "<string>" if what == "-c" else what, "exec"), vars(module))


def main(link: str, *imported: str) -> None:
    for name in imported:
        importlib.import_module(name)
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "a fork has one thread of several"
    gc.collect()
    gc.freeze()  # forks share these pages, and their collector has nothing to look for there
    become(*forked(socket.socket(fileno=int(link))))


if __name__ == "__main__":
    main(*sys.argv[1:])
