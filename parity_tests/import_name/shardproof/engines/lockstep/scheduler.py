"""The scheduler: one rank runs at a time, and the rank that stops chooses the next.

It knows which rank runs, the call that each waiting rank waits for, the ranks' random streams and module globals, and
the first failure of a run. It does not depend on collectives: a rank waits for any object with a `done` flag.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch

from shardproof.engines.failure import RankFailure
from shardproof.engines.lockstep import last_seen
from shardproof.engines.lockstep.rank_globals import RankGlobals


class Halt(BaseException):
    """Unwinds a rank after the run has failed; never itself the cause."""


class Pending(Protocol):
    done: bool


class Scheduler:
    """Passes the turn from rank to rank.

    All methods except `begin`, `over` and `dismiss` are for the rank that runs.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.globals = RankGlobals(world)
        self.running = 0
        self.moves = 0
        self.failure: RankFailure | None = None
        self.dismissed = False
        self.waits: list[Pending | None] = [None] * world
        self.finished = [True] * world
        self._turns = [threading.Lock() for _ in range(world)]
        self._over = threading.Lock()
        for lock in (*self._turns, self._over):
            lock.acquire()

    def begin(self, schedule: int, seeds: list[int], stuck: Callable[[], RankFailure]) -> None:
        """Give the first turn. `stuck` creates the failure if no rank can run; schedule 0 is round robin."""
        self._random = random.Random(schedule) if schedule else None
        self._stuck = stuck
        self.failure, self.moves = None, 0
        self.waits = [None] * self.world
        self.finished = [False] * self.world
        self._streams = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        last_seen.begin(self.world)
        self._give(self._next_rank(self._runnable(self.world - 1)))

    def over(self, seconds: float) -> bool:
        """Wait until every rank has left; False after `seconds`."""
        return self._over.acquire(timeout=seconds)

    def enter(self, rank: int) -> None:
        """Wait for the first turn of a run, or for the next after passing it on."""
        self._turns[rank].acquire()
        self.globals.enter(rank)
        if self.failure is not None or self.dismissed:
            raise Halt

    def check(self) -> None:
        """Unwind the calling rank if the run has failed."""
        if self.failure is not None:
            raise Halt
        self.moves += 1

    def maybe_yield(self, rank: int) -> None:
        """A point at which a seeded schedule may let another rank go first."""
        if self._random is not None and self._random.random() < 0.5:
            self._pass(rank)

    def wait(self, rank: int, pending: Pending) -> None:
        """Let others run until `pending.done`."""
        self.check()
        while not pending.done:
            self.waits[rank] = pending
            self._pass(rank)

    def let_others_run(self, rank: int) -> None:
        """Let the next runnable rank go first, if there is one: a polling rank must not starve the others.

        Polling is no progress: ranks that all poll for ever are stalled.
        """
        if self.failure is not None:
            raise Halt
        self._pass(rank)

    def can_others_run(self, rank: int) -> bool:
        """Whether another rank waits only for its turn."""
        return any(other != rank for other in self._runnable(rank))

    def wake(self, rank: int, pending: Pending) -> None:
        """`pending` is done; its rank can run again."""
        if self.waits[rank] is pending:
            self.waits[rank] = None

    def fail(self, failure: RankFailure) -> NoReturn:
        """Record the first failure of the run and unwind this rank."""
        self.failure = self.failure or failure
        raise Halt

    def leave(self, rank: int) -> None:
        """This rank has returned or raised: pass the turn on, or after the last rank wake the caller of `over`."""
        self.finished[rank] = True
        self.waits[rank] = None
        if self.dismissed:
            return
        if all(self.finished):
            last_seen.begin(0)
            self._over.release()
            return
        runnable = self._runnable(rank)
        if not runnable:  # all others wait for a rank that has left: the failure makes them runnable, to unwind
            self.failure = self._stuck()
            runnable = self._runnable(rank)
        self._give(self._next_rank(runnable))

    def dismiss(self) -> None:
        """End the session from outside.

        Every rank that is not running leaves by itself, and there are no more turns.
        """
        self.dismissed = True
        for rank, lock in enumerate(self._turns):
            if (rank != self.running or self.finished[rank]) and lock.locked():
                lock.release()

    def _pass(self, rank: int) -> bool:
        """Pass the turn on and wait to get it back; False if no other rank can take it."""
        # 1. Which ranks can run? None: every rank waits for another, which is a deadlock.
        runnable = self._runnable(rank)
        if not runnable:
            self.failure = self._stuck()
            raise Halt
        # 2. Choose the next rank: in order, or at random from the seed.
        next_rank = self._next_rank(runnable)
        if next_rank == rank:
            return False
        # 3. Save this rank's random stream, wake the other thread, and sleep until the turn comes back.
        self._streams[rank] = torch.default_generator.get_state()
        self._give(next_rank)
        self.enter(rank)
        return True

    def _give(self, rank: int) -> None:
        torch.default_generator.set_state(self._streams[rank])
        last_seen.turn(rank, has_returned=self.finished[self.running])
        self.running = rank
        self._turns[rank].release()

    def _runnable(self, rank: int) -> list[int]:
        """Runnable ranks, from the next on.

        After a failure these are all unfinished ranks, else all ranks that are not waiting.
        """
        order = [(rank + step) % self.world for step in range(1, self.world + 1)]
        failed = self.failure is not None
        return [r for r in order if not self.finished[r] and (failed or self.waits[r] is None)]

    def _next_rank(self, runnable: list[int]) -> int:
        return runnable[0] if self.failure is not None or self._random is None else self._random.choice(runnable)
