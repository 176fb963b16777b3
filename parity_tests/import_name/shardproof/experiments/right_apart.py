"""Find the edits of a running function that make cases right; forked processes try them, because an edit may crash.

An edited function may crash in native code, never end, or leave wrong values in a cache. So it runs in a fork of this
process, which ends after the search. The fork has every module, every function and the references of the cases, and
starts no JAX.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.endings import exits, signals
from shardproof.endings.raised import none_if_raised
from shardproof.engines.engines import run
from shardproof.engines.failure import RankFailure
from shardproof.engines.lockstep import lockstep
from shardproof.engines.processes import orphans
from shardproof.engines.program import Program
from shardproof.experiments.live_objects import caches
from shardproof.judge.compare import compared
from shardproof.judge.reference import Reference, evaluate, undefined_gradients

MOST_PROCESSES = 4
QUIET_S = 2.0  # the time that an edited function may compute between two collectives
END, RIGHT = "end", "=right"  # written by a process
WALL = 3.0  # at most so many seconds for each second of computing, on a machine that others use as well


@dataclass(frozen=True)
class JudgedCase:
    """A case with all that judging a run of it needs."""

    case: CaseSpec
    reference: Reference
    undefined: dict[str, np.ndarray]

    @classmethod
    def of(cls, scheme: Declared, case: CaseSpec) -> JudgedCase:
        program = Program.of(scheme)
        reference = evaluate(scheme, program, case)
        return cls(case, reference, undefined_gradients(scheme, program, case, reference))

    def is_right(self, scheme: Declared, wrap: Callable[[Program], Callable[..., Any]] | None = None) -> bool:
        """Whether every tensor is right, as the function is now, or as `wrap` makes it."""
        program = Program.of(scheme)
        try:
            results = run(wrap(program) if wrap else program, self.case, self.case.engine, quiet_s=QUIET_S).results
        except RankFailure:
            return False
        return all(tensor.ok for tensor in compared(scheme, self.case, results, self.reference, self.undefined))


def judged_cases(scheme: Declared, derived: Iterable[CaseSpec | None]) -> list[JudgedCase]:
    """The cases that exist and that the reference takes."""
    judged = (none_if_raised(JudgedCase.of)(scheme, case) for case in derived if case is not None)
    return [each for each in judged if each is not None]


def can_fork() -> bool:
    """Whether a fork of this process can run the ranks of lockstep."""
    return sys.platform.startswith("linux") and not torch.cuda.is_initialized()


def which_are_right(scheme: Declared, edits: Sequence[Any], judged: Sequence[JudgedCase], seconds: float) -> list[int]:
    """The numbers of the edits with which all cases are right, among the edits that are tried in time.

    Several processes share the edits, and each may compute for `seconds`. If an edit ends its process, another process
    goes on with the next edit.
    """
    until = time.monotonic() + WALL * seconds
    count = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(edits)))
    found: list[int] = []
    with selectors.DefaultSelector() as selector:
        for share in range(count):
            _start(selector, range(share, len(edits), count), scheme, edits, judged, seconds)
        while selector.get_map() and time.monotonic() < until:
            for key, _ in selector.select(timeout=0.1):
                worker: _Worker = key.data
                text = os.read(worker.pipe, 1 << 12)
                if text:
                    worker.text += text
                    continue
                selector.unregister(worker.pipe)
                worker.end()
                found += worker.found
                if worker.left:
                    _start(selector, worker.left, scheme, edits, judged, seconds)
        for key in list(selector.get_map().values()):
            key.data.end()
            found += key.data.found
    return sorted(found)


@dataclass
class _Worker:
    """A forked process that tries `share`: it writes `7` before edit 7, and `7=right` after it if it is right."""

    process: int
    pipe: int
    share: Sequence[int]
    text: bytes = b""

    @property
    def found(self) -> list[int]:
        return [int(word.removesuffix(RIGHT)) for word in self.text.decode().split() if word.endswith(RIGHT)]

    @property
    def left(self) -> Sequence[int]:
        """The edits after the one that crashed the process; none if it has finished."""
        words = [word for word in self.text.decode().split() if not word.endswith(RIGHT)]
        if not words or words[-1] == END:
            return ()
        return self.share[self.share.index(int(words[-1])) + 1 :]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.pipe)


def _start(
    selector: selectors.BaseSelector,
    share: Sequence[int],
    scheme: Declared,
    edits: Sequence[Any],
    judged: Sequence[JudgedCase],
    seconds: float,
) -> None:
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of a fork; the child does not use it
        process = os.fork()
    if process == 0:
        _run(parent, writing, lambda: _try_edits(share, scheme, edits, judged, seconds, writing))
    os.close(writing)
    selector.register(reading, selectors.EVENT_READ, _Worker(process, reading, share))


def _run(parent: int, pipe: int, job: Callable[[], None]) -> NoReturn:
    """In the forked process: do the job in silence, and end without the interpreter's clean-up."""
    try:
        for number in (signal.SIGINT, *signals.ASKING):
            signal.signal(number, signal.SIG_DFL)
        orphans.tie(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        job()
        os.write(pipe, END.encode())
    finally:
        exits.leave(0)


def _try_edits(
    share: Sequence[int],
    scheme: Declared,
    edits: Sequence[Any],
    judged: Sequence[JudgedCase],
    seconds: float,
    pipe: int,
) -> None:
    torch.set_num_threads(1)  # the threads of its pools stay with the parent
    lockstep.forget_sessions()
    kept = caches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in share:
            if time.process_time() > seconds:
                return
            os.write(pipe, f"{number}\n".encode())
            with edits[number].applied() as is_applied:
                for cache in kept:
                    cache.cache_clear()
                if is_applied and all(each.is_right(scheme) for each in judged):
                    os.write(pipe, f"{number}{RIGHT}\n".encode())
