"""One rank of a torchrun job: it leads or follows, and runs each job in a thread of its own.

So while a rank hangs in a collective, its main thread still answers and can exit on order. All ranks number orders
alike: rank 0 writes `do/n` and, when a job is over, `over/n`; the others write `done/n/rank`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from shardproof.endings import exits
from shardproof.engines import compiling, launched
from shardproof.engines.failure import NotRun, RankFailure
from shardproof.engines.ledger import line_of_thread
from shardproof.engines.processes import orphans, server
from shardproof.engines.processes.rank import Job, Rank, observe, rows_so_far
from shardproof.engines.processes.root_cause import DIED, DONE, RUNNING, Outcome, find_root_cause
from shardproof.engines.processes.status_table import WAITING, StatusTable
from shardproof.engines.processes.traces import Traces, folder_of_job

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")  # environment variables that torch reads
PIECE = 4 << 20
ATTEMPT_S = 60.0
LOOK_S = 1.0  # for one wait for a message, during which signals are not handled


@cache
def environment() -> Mapping[str, str]:
    """The environment that torchrun has started this process in: a file of schemes may change it later."""
    return dict(os.environ)


def place() -> tuple[int, int]:
    """(rank, world) as torchrun has set them. Errors: ValueError if it has not."""
    try:
        return int(environment()["RANK"]), int(environment()["WORLD_SIZE"])
    except KeyError as missing:
        raise ValueError(
            f"engines.launch: {missing.args[0]} is not set, so this is no torchrun job; start it with "
            "torchrun --nproc-per-node N -m shardproof in place of shardproof"
        ) from None


def connect() -> tuple[dist.Store, Channel]:
    """The store for process groups, and a channel on its own connection."""
    from torch.distributed.rendezvous import rendezvous

    os.environ |= {name: value for name, value in environment().items() if name.startswith(OF_TORCHRUN)}
    store, _, _ = next(iter(rendezvous("env://")))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    connection = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=ATTEMPT_S))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store, Channel(dist.PrefixStore(f"shardproof/{attempt}", connection))


def _folder_of_host(channel: Channel, rank: int) -> Path | None:
    """A folder for the traces of the ranks of one host, made by its first rank; None if none can be made or seen."""
    name = f"folder/{environment().get('GROUP_RANK', '0')}"
    if int(environment().get("LOCAL_RANK", rank)) == 0:
        try:
            channel.put(name, folder_of_job(launched.agent or os.getppid()))
        except OSError:
            channel.put(name, "")
    folder = channel.get(name)
    return Path(folder) if folder and os.access(folder, os.W_OK) else None


class Channel:
    """Named messages between the ranks over the rendezvous store: they arrive even if groups are broken.

    A name is used once; the last reader removes it. Messages are written in pieces, because the store takes a few MB at
    a time.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def put(self, name: str, message: Any) -> None:
        data = pickle.dumps(message)
        pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)]
        for i, piece in enumerate(pieces[1:], 1):
            self._store.set(f"{name}/{i}", piece)  # pyright: ignore[reportArgumentType]  (stubs know text only)
        head = len(pieces).to_bytes(4, "big") + pieces[0]
        self._store.set(name, head)  # pyright: ignore[reportArgumentType]

    def has(self, name: str) -> bool:
        return self._store.check([name])

    def add(self, name: str, amount: int = 1) -> int:
        return self._store.add(name, amount)

    def count(self, name: str) -> int:
        return self.add(name, 0)

    def get(self, name: str, *, remove: bool = False, check: Callable[[], object] = lambda: None) -> Any:
        """Wait for a message without a limit, and read it; `check` is called while none comes."""
        while True:
            try:
                self._store.wait([name], timedelta(seconds=LOOK_S))
                break
            except dist.DistStoreError:
                check()
        head = self._store.get(name)
        names = [f"{name}/{i}" for i in range(1, int.from_bytes(head[:4], "big"))]
        data = head[4:] + b"".join(self._store.get(piece) for piece in names)
        if remove:
            for key in (name, *names):
                self._store.delete_key(key)
        return pickle.loads(data)


class LeaderGone(Exception):
    """Rank 0 has ended, and no order will come any more."""


TICK_S = 0.01
SHOW_S = 0.2  # between two signs of progress
COLLECT_S = 0.5  # for the others, after the first failure
ENDING_S = LOOK_S + 0.5  # for the others, when torchrun ends the job
AGENT_S = 2.0  # torchrun ends the job within this time after a rank dies with a status other than 0
ARM_S = 1.0  # between two settings of the alarm
HELD_S = 12.0  # for which a job may hold the interpreter in native code: longer than a rank may compute
ANSWER_S = 3.0  # for a rank to answer an order, and for a hanging rank to come free
STOP_S = 2.0  # for a rank to say where it is; a rank with a held interpreter never does


class Member:
    """Base of both kinds of rank: a channel, groups, and the thread that runs a job."""

    current: Member | None = None  # the instance of this process

    def __init__(self, rank: int, world: int) -> None:
        server.warm()
        orphans.adopt()
        self.rank, self.world, self.number = rank, world, 0
        self.store, self.channel = connect()
        self._folder = _folder_of_host(self.channel, rank)
        self._table = StatusTable(self._folder and self._folder / "status", world)
        self._stacks: IO[str] | None = None
        if self._folder is not None:
            self._stacks = self._traces(rank).begin()
        self._shown = (0.0, 0)
        self._moved = 0.0  # when the status table last changed
        self._armed = 0.0  # when the alarm was set
        self._runner: Rank | None = None
        self._thread = threading.Thread()
        self.outcome: Outcome | None = None
        Member.current = self
        observe()

    def start(self, generation: int, job: Job) -> None:
        """Run the job in a thread. The first job of a generation creates its groups."""
        number, self.outcome = self.number, None
        gpus, gpu = torch.cuda.device_count(), int(environment().get("LOCAL_RANK", self.rank))
        backend = "nccl" if 0 < int(environment().get("LOCAL_WORLD_SIZE", self.world)) <= gpus else "gloo"

        def work() -> None:
            if self._runner is None:
                store = dist.PrefixStore(f"groups/{generation}", self.store)
                self._runner = Rank(self._table.slot(self.rank), backend, store, self.rank, self.world, gpu)
            self.outcome = self._runner.run(job, ready=lambda: self.channel.add(f"ready/{number}"))

        self._thread = threading.Thread(target=work, name="rank", daemon=True)
        self._arm()  # before the job, which may hold the interpreter from its first line on
        self._thread.start()

    def tick(self) -> None:
        """Wait a moment for the job, and report progress if the status table has changed or the job compiles."""
        self._thread.join(TICK_S)
        now, (when, writes) = time.monotonic(), self._shown
        if now - self._armed >= ARM_S:
            self._arm()
        if now < when + SHOW_S:
            return
        written = self._table.status(self.rank).writes
        has_moved = writes != written
        self._moved = now if has_moved else self._moved
        if has_moved or (now - self._moved < compiling.LIMIT_S and compiling.is_compiling(self._thread.ident)):
            self._shown = now, written
            self.channel.add("moves")

    def _arm(self) -> None:
        """End this process unless it is armed again in time: its stacks are written, and torchrun ends the job.

        While native code of the job holds the interpreter, no thread of Python has a turn.
        """
        faulthandler.dump_traceback_later(HELD_S, exit=True, file=self._stacks or sys.stderr)
        self._armed = time.monotonic()

    def disarm(self) -> None:
        """The job is over, or waited for no longer."""
        faulthandler.cancel_dump_traceback_later()
        self._armed = 0.0

    def seen(self) -> Outcome:
        """The outcome, or the current place of the job."""
        status = self._table.status(self.rank)
        is_waiting = status.state == WAITING
        line = None if is_waiting else line_of_thread(self._thread.ident)
        where = Outcome(
            self.rank, RUNNING, rows_so_far(), state=status.sentence(line), is_waiting=is_waiting, source=line
        )
        return self.outcome or where

    def last_words(self, ends: str) -> str | RankFailure:
        """This rank's report when the job `ends`, for example by torchrun after a rank of its host has died.

        The first rank that is left on the host says for all how that one died; the others say nothing.
        """
        mine = self.seen()
        with contextlib.suppress(dist.DistError):
            self.channel.put(f"ending/{self.rank}", mine)
            died = self._died()
            if died and not self._is_first():
                return ""
            answers = {self.rank: mine} | self._endings(died)
            failure = find_root_cause([(answers | died)[rank] for rank in sorted(answers | died)], None)
            if died and failure is not None:
                return failure
        has_failed = self.outcome is not None and self.outcome.kind != DONE
        where = f"; {mine}" if has_failed or self._thread.is_alive() else ""
        return f"rank {self.rank}: {ends}{where}"

    def _endings(self, died: Collection[int]) -> dict[int, Outcome]:
        """The reports of the other live ranks; a rank that takes too long has none."""
        endings: dict[int, Outcome] = {}
        deadline = time.monotonic() + ENDING_S
        others = set(range(self.world)) - {self.rank, *died}
        while others and time.monotonic() < deadline:
            here = {rank for rank in others if self.channel.has(f"ending/{rank}")}
            endings |= {rank: self.channel.get(f"ending/{rank}") for rank in here}
            others -= here
            time.sleep(TICK_S)
        return endings

    def _traces(self, rank: int) -> Traces:
        return Traces(self._folder or "", rank)

    def _of_host(self) -> dict[int, Traces]:
        """The ranks of this host, but this one, that have begun and have not left by themselves."""
        traces = {rank: self._traces(rank) for rank in range(self.world) if rank != self.rank and self._folder}
        return {rank: each for rank, each in traces.items() if each.pid is not None}

    def _is_first(self) -> bool:
        """Whether no lower rank is left on this host."""
        return not any(rank < self.rank and traces.is_running for rank, traces in self._of_host().items())

    def _died(self) -> dict[int, Outcome]:
        return {rank: each.dead(self._table) for rank, each in self._of_host().items() if not each.is_running}

    def _silent(self, rank: int) -> Outcome:
        """The outcome of a rank that does not answer; of another host, no more is known."""
        traces = self._of_host().get(rank)
        if traces is None:
            return Outcome(rank, DIED, state="it does not answer")
        return traces.silent(self._table) if traces.is_running else traces.dead(self._table)

    def leave(self) -> None:
        """This process ends by itself. The first one left on the host removes the traces, which it has told."""
        if self._folder is not None:
            self._traces(self.rank).leave()
            if self._is_first():
                shutil.rmtree(self._folder, ignore_errors=True)

    def leave_groups(self, seconds: float = 0.0) -> bool:
        """Close this rank's groups, which frees ranks that wait for it.

        False if the job still hangs after `seconds`.
        """
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if dist.is_initialized():
            dist.destroy_process_group()
        self._runner = None
        gc.collect()  # meshes hold groups in reference cycles, and a group keeps its sockets until it is freed
        return True

    def leave_if_hung(self, status: int) -> None:
        """Exit at once if a thread hangs in native code, because the interpreter would wait for it."""
        self.leave()
        if not self.leave_groups():
            exits.leave(status)


class Leader(Member):
    """Rank 0."""

    def __init__(self, world: int) -> None:
        super().__init__(0, world)
        self.generation = 0
        self._is_broken = self._is_lost = self._is_over = False

    def run(self, job: Job, quiet_s: float) -> tuple[list[Outcome], float | None]:
        """Run a job on all ranks: every outcome, and the quiet seconds if lack of progress stopped them."""
        self._order("job", (self.generation, job))
        self.start(self.generation, job)
        quiet = self._wait(quiet_s)
        self.disarm()
        self.channel.put(f"over/{self.number}", None)
        answers = {0: self.seen()} | self._answers(STOP_S)
        outcomes = [answers.get(r) or self._silent(r) for r in range(self.world)]
        self._is_broken = any(outcome.kind != DONE for outcome in outcomes)
        if self._is_broken:
            self.leave_groups()
        return outcomes, quiet

    def regroup(self) -> bool:
        """After a failure: True if all ranks are back, and the next job gets new groups. Errors: NotRun."""
        if not self._is_broken:
            return False
        if not self._is_lost:
            self._order("regroup", None)
            answers = self._answers(2 * ANSWER_S)
            is_free = self.leave_groups(ANSWER_S)
            self._is_lost = not (is_free and len(answers) == self.world - 1 and all(answers.values()))
        if self._is_lost:
            raise NotRun("torchrun: a rank still hangs after an earlier failure; run this one alone")
        self.generation, self._is_broken = self.generation + 1, False
        return True

    def finish(self, status: int) -> None:
        """End the other ranks, once. If this rank hangs, exit at once."""
        if not self._is_over:
            self._is_over = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun may send signals to ranks that are about to exit
            self._order("finish", status)
            self._answers(ANSWER_S)
            orphans.end()
            self.leave_if_hung(status)

    def _order(self, kind: str, content: Any) -> None:
        self.number += 1
        self.channel.put(f"do/{self.number}", (kind, content))

    def _wait(self, quiet_s: float) -> float | None:
        """Wait until all ranks are done, a failure or a death is COLLECT_S old, or nothing has moved for too long."""
        n, moves, moved, deadline = self.number, -1, time.monotonic(), None
        looked, alive = moved, moved
        while self.outcome is None or self.channel.count(f"done/{n}") < self.world - 1:
            self.tick()
            now, before, moves = time.monotonic(), moves, self.channel.count("moves")
            if before != moves or self.channel.count(f"ready/{n}") < self.world:
                moved = now
            is_failed = self.outcome is not None and self.outcome.kind != DONE
            if now >= looked + SHOW_S:
                looked, alive = now, alive if self._died() else now
            if deadline is None and (is_failed or self.channel.count(f"failed/{n}") or now >= alive + AGENT_S):
                deadline = now + COLLECT_S
            if deadline is not None and now >= deadline:
                return None
            if deadline is None and now - moved >= quiet_s:
                return now - moved
        return None

    def _answers(self, seconds: float) -> dict[int, Any]:
        """The other ranks' answers to this order that arrive in time."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        for rank in range(1, self.world):
            name = f"done/{self.number}/{rank}"
            while not self.channel.has(name) and time.monotonic() < deadline:
                time.sleep(TICK_S)
            if self.channel.has(name):
                answers[rank] = self.channel.get(name, remove=True)
        return answers


class Follower(Member):
    """Any other rank."""

    def follow(self) -> int:
        """Execute orders of rank 0 until `finish`; returns the exit status."""
        while True:
            self.number += 1
            kind, content = self.channel.get(f"do/{self.number}", check=self._check_leader)
            if kind == "finish":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._answer(True)
                orphans.end()
                self.leave_if_hung(content)
                return content
            if kind == "regroup":
                self._answer(self.leave_groups(ANSWER_S))
            else:
                self._take_part(*content)

    def _take_part(self, generation: int, job: Job) -> None:
        over = f"over/{self.number}"
        self.start(generation, job)
        while self.outcome is None and not self.channel.has(over):
            self.tick()
        self.disarm()
        outcome = self.seen()
        if outcome.kind != DONE:
            self.channel.add(f"failed/{self.number}")
        self._answer(outcome)
        self.channel.get(over, check=self._check_leader)
        if outcome.kind != DONE:
            self.leave_groups()

    def _check_leader(self) -> None:
        """LeaderGone if rank 0 has ended without an order. Torchrun takes an end with status 0 for a success."""
        leader = self._of_host().get(0)
        if leader is not None and not leader.is_running:
            raise LeaderGone

    def _answer(self, content: Any) -> None:
        # Write the message last: rank 0, which holds the store, may exit once it has the answer to its finish.
        self.channel.add(f"done/{self.number}")
        self.channel.put(f"done/{self.number}/{self.rank}", content)
