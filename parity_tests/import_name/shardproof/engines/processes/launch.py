"""The torchrun engine: rank 0 draws and judges, the other ranks serve.

    torchrun --nnodes 2 --nproc-per-node 8 -m shardproof verify FILE --engine torchrun

How a command uses it, on every rank alike:

    if not launch.is_rank_zero():
        return launch.serve()               # until rank 0 finishes; the status to leave with; loads no JAX
    ...                                     # draw meshes of launch.world_size() ranks only, and
    ranks = launch.run(fn, case)            # as often as there are cases
    launch.finish(status)                   # sends the others home; where this rank hangs, it does not return

Cases, outcomes and ledgers travel over the rendezvous store, one message each. After a failure the ranks form new
groups; if a rank still hangs, all later runs raise NotRun. torchrun notices a dead rank: it ends the others on that
host, and each reports where it was. A dead host is noticed by its missing answers or, if it held the store, by the lost
store: every rank then exits with a message.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import cloudpickle
import torch.distributed as dist

from shardproof.declare import discover
from shardproof.declare.case import CaseSpec
from shardproof.declare.travel import dumps
from shardproof.endings import exits, signals
from shardproof.endings.exit_status import RANK_FAILED, USAGE
from shardproof.endings.raised import message_of
from shardproof.engines import launched
from shardproof.engines.creation import without_creations
from shardproof.engines.failure import NotRun, RankFailure
from shardproof.engines.ledger import Ledger, RunResult
from shardproof.engines.processes import orphans
from shardproof.engines.processes.member import Follower, Leader, LeaderGone, Member, place
from shardproof.engines.processes.root_cause import find_root_cause

LOOK_S = 0.5  # between two polls
_watching: list[threading.Thread] = []


def leave_with_agent() -> None:
    """From the first call on, end this process soon after its torchrun agent, if it has one.

    So no process is left on a host after its agent is killed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not _watching:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent when the agent ends while the command imports
        _watching.append(threading.Thread(target=_watch, args=(os.getppid(),), name="agent", daemon=True))
        _watching[0].start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    leave(f"the torchrun agent of this host (process {launched.agent or parent}) has ended, and its ranks with it")


def _ended(number: int, _: object = None) -> NoReturn:
    """torchrun ends the ranks of a host after one has died, or a batch system a job: they report where they are."""
    signals.ignore_asking()  # it comes from torchrun and from this process's parent
    member = Member.current
    ends = "torchrun ends this job" if number == signal.SIGTERM else f"ended by {signals.signal_name(number)}"
    words = f"rank {os.environ.get('RANK', '?')}: {ends}" if member is None else member.last_words(ends)
    _leave(str(words), words if isinstance(words, RankFailure) else None)


def leave(reason: str) -> NoReturn:
    """Exit at once, even if native code hangs."""
    _leave(f"rank {os.environ.get('RANK', '?')}: {reason}")


@contextmanager
def telling(tell: Callable[[str, RankFailure | None], object]) -> Iterator[None]:
    """In this block, rank 0 calls `tell` if torchrun ends the job, to print the verdicts so far.

    Its arguments are the sentence and, if a rank has failed, the failure with its case.
    """
    global _tell
    before, _tell = _tell, tell
    try:
        yield
    finally:
        _tell = before


def _leave(sentence: str, failure: RankFailure | None = None) -> NoReturn:
    global _tell
    tell, _tell = _tell, None
    if tell is not None:
        try:
            if failure is not None:
                failure.case = _case
            tell(sentence, failure)
        except Exception as error:  # the end of a process, at any of its lines
            sys.stderr.write(f"shardproof: the verdicts so far could not be printed: {message_of(error)}\n")
    if sentence:
        sys.stderr.write(f"shardproof: {sentence}\n")
        sys.stderr.flush()
    orphans.end()
    if Member.current is not None:
        Member.current.leave()
    exits.leave(RANK_FAILED)


T = TypeVar("T")
_tell: Callable[[str, RankFailure | None], object] | None = None
_case: CaseSpec | None = None  # the last one that rank 0 has run
_leader: Leader | None = None
_sent: set[str] = set()
_failed: tuple[str, str, RankFailure] | None = None


def is_rank_zero() -> bool:
    """Whether this process leads. From now on it ends when its agent ends.

    Errors: ValueError if this process was not started by torchrun.
    """
    rank, world = place()  # before any file of schemes, which may change the environment
    if launched.is_over:
        return True
    leave_with_agent()
    for number in signals.ASKING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _ended)
    if rank == 0 and world > 1:
        atexit.register(_send_home)
    return rank == 0


def world_size() -> int:
    return place()[1]


def run(fn: Callable[[Any, CaseSpec], Any], case: CaseSpec, quiet_s: float = 10.0) -> RunResult:
    """On rank 0: run `fn(mesh, case)` on every rank of the job.

    Errors: RankFailure, one subclass per cause; ValueError if the mesh and the job have different numbers of ranks;
    NotRun if a rank still hangs in an earlier run.
    """
    global _leader, _failed, _case
    if launched.is_over:
        raise NotRun("the job has ended")
    rank, world = place()
    if rank != 0:
        raise ValueError(f"engines.launch: rank {rank} called run; only rank 0 runs, the others serve")
    if case.world != world:
        raise ValueError(f"engines.launch: mesh {dict(case.mesh)} has {case.world} ranks, the job has {world}")
    file = discover.file_of(fn)
    function = dumps(fn, file_is_imported=file is not None)
    if _leader is None:
        _leader = _with_store(partial(Leader, world))
        atexit.register(finish, 0)
    leader, _case = _leader, case
    launched.note(case)
    key = hashlib.sha256(function).hexdigest()
    try:
        if _with_store(leader.regroup):
            _sent.clear()
    except NotRun:
        if _failed is not None and _failed[:2] == (key, case.json):
            raise _failed[2] from None  # the same case hung before: repeat its failure
        raise
    path = [entry or os.getcwd() for entry in sys.path]
    job = (key, None if key in _sent else function, file, path, case.json)
    _sent.add(key)
    start = time.monotonic()
    outcomes, quiet = _with_store(partial(leader.run, job, quiet_s))
    seconds = time.monotonic() - start
    failure = find_root_cause(outcomes, case, quiet)
    if failure is not None:
        _failed = (key, case.json, failure)
        raise failure
    ledger = Ledger(without_creations([row for outcome in outcomes for row in outcome.rows]))
    return RunResult(tuple(cloudpickle.loads(outcome.result) for outcome in outcomes), ledger, seconds)


def serve() -> int:
    """On the other ranks: take part in every run until rank 0 finishes; returns the exit status."""
    return _with_store(lambda: Follower(*place()).follow())


def finish(status: int) -> None:
    """On rank 0: end the other ranks with this status; only the first call has an effect."""
    global _leader
    if launched.is_over:
        return
    if _leader is None and world_size() > 1:
        _leader = _with_store(partial(Leader, world_size()))  # nothing has run, and the others still wait
    if _leader is not None:
        _with_store(partial(_leader.finish, status))


def _send_home() -> None:
    """End the other ranks if rank 0 exits before its first run, as for a wrong argument."""
    if _leader is None:
        finish(USAGE)


def _with_store(call: Callable[[], T]) -> T:
    """Call, and exit if the store is gone: there is no rank left to lead and no message to wait for."""
    try:
        return call()
    except LeaderGone:
        _ended(signal.SIGTERM)
    except dist.DistError as error:
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        leave(f"the store of the job at {at} is gone, and with it the host that held it ({str(error).splitlines()[0]})")
