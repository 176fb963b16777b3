"""Run a command in its own process, so that no end of that process can lose or fake a verdict.

On lockstep the ranks are threads of the command, and references, draws and imports run in it too: a crash in native
code, a signal or `os._exit` ends the whole process. The parent, which has loaded nothing, waits. It believes a status
only if the child has recorded it as its last act (last_words.py). It ends a child that is stopped, that waits for ever
in a scheme or in an exit function, or that holds its interpreter for ever during a run of lockstep. If schemes are left
to judge after a death, it starts another child, which takes the verdicts so far from the journal (journal.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NoReturn

from shardproof.endings import exits, journal, signals
from shardproof.endings.exit_status import INTERNAL, INTERRUPTED, INTERRUPTED_SENTENCE, RANK_FAILED, UNREAD, USAGE
from shardproof.endings.journal import Journal
from shardproof.endings.last_words import LastWords
from shardproof.endings.signals import STACKS
from shardproof.engines import last_act, launched, process_limits
from shardproof.engines.last_act import PASSED_ON, complain, flush
from shardproof.engines.processes import orphans
from shardproof.engines.processes.idleness import Idleness, Ready
from shardproof.engines.processes.status_table import COMPUTING, StatusTable

if TYPE_CHECKING:
    from shardproof.engines.failure import RankFailure

MOST_RANKS = 64
RANK = "RANK"  # set by every launcher, which ends its processes itself; many a job's environment has it too
ENGINE = "torchrun"  # where RANK alone is set, only a command with this argument is a rank of a launcher
SENT_BY_A_PROCESS = 0  # si_code; a terminal's signal reaches the child without help
TICK_S = 0.5
MARGIN_S = 2.0  # beyond the limit of a run, which lockstep itself keeps while the interpreter is free
IDLE_S = 120.0  # beyond the limit of a run, how long all processes of the command may be idle in a user's code
STOPPED_S = 3.0  # how long a child may be stopped while its parent runs
GRACE_S = 5.0  # from a signal that was passed on to the end; the child can compute until then
TELLING_S = 20.0  # how long a process that can compute may take to print the verdicts of another
ORPHANS_S = 2.0  # how long the processes of an ended child get to end by themselves, as a fork server does
LONG_IMPORT_S = 30.0  # after which an import is named, as one that waits for the other ranks of a launcher
STACKS_S = 0.5  # how long the fault handler gets to write the stacks of all threads
OUTDATED = 76  # the status of a call that was ended because nobody needs its verdict any more
AFRESH = 75  # the status of a command that asks to start again from its beginning, in a fresh process
ADVICE = "--engine gloo runs each rank in a process of its own"

table: StatusTable | None = None  # of the command in this process, shared with its parent
words: LastWords | None = None  # likewise
is_over = False  # whether this process only prints the verdicts of one that did not end as a signal asked
may_import = True  # unless a process that only prints has hung, as in a user's file: then the next runs none of it


def supervised(call: Callable[[], int | None]) -> int:
    """Run `call` in a forked process, and return its status; 3, and a sentence on stderr, if the process dies before.

    Signals sent to this process alone are forwarded, and the child ends when its parent is killed. The forked process
    never returns from here. `call` runs in this process if a fork is not safe: JAX has been used, or another thread
    runs. A user's `os._exit` raises there too. Under a launcher such as torchrun, see launched.py.
    """
    _open_standard_files()
    is_launched = launched.AGENT in os.environ or (RANK in os.environ and any(ENGINE in word for word in sys.argv))
    if not sys.platform.startswith("linux") or _has_used_jax() or threading.active_count() > 1:
        exits.install_alone()
        return call() or 0
    try:
        os.getcwd()
    except OSError:  # libraries of torch end a process there
        complain("the working folder has been removed; change to one that is there")
        return USAGE
    with contextlib.ExitStack() as files:
        try:
            stack, file = (files.enter_context(tempfile.TemporaryFile(mode)) for mode in ("w+", "w+b"))
        except OSError as error:
            complain(f"no temporary file can be made: {error.strerror}; set TMPDIR to a folder that can be written")
            return USAGE
        try:
            if is_launched:
                return launched.Rank(call, Journal(file)).status()
            return _Command(call, stack, Journal(file)).status()
        except OSError as error:  # a limit of processes or of memory; a child that runs ends with this process
            complain(f"the process of the command cannot be started or watched: {error.strerror}")
            return USAGE


def _open_standard_files() -> None:
    """Open standard files that are closed: else a file of ours would be taken for standard error."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def _has_used_jax() -> bool:
    """Whether JAX has started its threads, which a fork would not have. Its import starts none, its first use does."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return "jax" in sys.modules and bool(getattr(bridge, "_backends", True))


def supervised_in_turn(call: Callable[[], int | None], is_outdated: Callable[[], bool] = lambda: False) -> int:
    """Like `supervised`, for a process that stays and calls this many times, such as `verify --watch`.

    Each call runs in a process of its own, a fork of this one: it has the modules that this one has imported, and
    nothing of an earlier call. This process must run one thread only, so that JAX may be imported and not used: its
    first use starts threads, which a fork would not have. Once `is_outdated` is true, the call's process is ended:
    OUTDATED.

    Errors: KeyboardInterrupt if this process was interrupted meanwhile.
    """
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with contextlib.ExitStack() as resources:
        stack, file = (resources.enter_context(tempfile.TemporaryFile(mode)) for mode in ("w+", "w+b"))
        command = _Command(call, stack, Journal(file), is_outdated)
        try:
            status = command.status()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    if command.asked == signal.SIGINT:
        raise KeyboardInterrupt
    if command.asked is not None:
        os.kill(os.getpid(), command.asked)
    return status


@dataclass(frozen=True)
class Death:
    """How a child died; `why` and `seconds` are given if its parent has ended it.

    `key` and `is_judged` are read before the kill: a stopped child is continued, and runs until the signal reaches it.
    """

    exit_code: int  # minus N for signal N
    key: str | None  # the key of the journal that it had begun
    is_judged: bool  # all verdicts were printed
    why: str = ""  # "stopped", "silent", "idle", "asked" or "outdated"
    seconds: float = 0.0


class _Command:
    """One command, and the child that runs it."""

    def __init__(
        self,
        call: Callable[[], int | None],
        stack: IO[str],
        record: Journal,
        is_outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._call, self._stack, self._journal, self._is_outdated = call, stack, record, is_outdated
        self._parent = os.getpid()
        self._table, self._words = StatusTable(None, MOST_RANKS), LastWords()
        self.asked: int | None = None  # the signal that asks this command to end
        # Leave out ignored signals, as SIGHUP under nohup: a blocked signal is received even if it is ignored.
        self._passed_on = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]

    def status(self) -> int:
        # Block signals until this process ends: none is lost between fork and wait, and none interrupts a sentence.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*self._passed_on, signal.SIGCHLD))
        # A starter may have ignored SIGCHLD: then the system would tell no status of a child.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        orphans.adopt()
        others = orphans.children()
        death: Death | None = None
        lost: set[str] = set()
        while True:
            ended = self._ended(self._fork(death))
            orphans.end(but=others, grace_s=ORPHANS_S)
            if ended == AFRESH:
                continue
            if isinstance(ended, int):
                return ended
            death, key = ended, ended.key
            if death.why == "outdated":
                return OUTDATED
            if self.asked is not None or signals.is_of_a_limit(-death.exit_code, resource.RUSAGE_CHILDREN):
                self.asked = self.asked or -death.exit_code
                if not death.is_judged and self._journal.is_to_tell:
                    self._tell(death)
                return self._as_asked(self.asked, death)
            if death.exit_code == -signal.SIGPIPE and key is None:
                return UNREAD
            if key is None or key in lost or death.is_judged:
                complain(str(self._cause(death)))
                return RANK_FAILED
            lost.add(key)

    def _fork(self, death: Death | None) -> int:
        """A child that runs the command; after a death, it goes on where the dead child was."""
        flush()
        self._journal.start_child()
        self._words.beat(0.0)  # the next child begins with the sentence about the death of the last one
        child = os.fork()
        if child == 0:
            self._run(death)
        return child

    def _ended(self, child: int) -> int | Death:
        """Wait for the child and forward signals from other processes: the status that it has recorded, or a death."""
        watch = _Watch(child, self._words, self._journal)
        why, seconds, asked = "", 0.0, None
        was_at: tuple[str | None, bool] | None = None
        while True:
            received = signal.sigtimedwait((*self._passed_on, signal.SIGCHLD), TICK_S)
            if received is not None and received.si_signo in self._passed_on:
                self.asked = self.asked or received.si_signo
                self._words.ask()
                asked = asked or Ready(child)
                if received.si_code == SENT_BY_A_PROCESS:
                    os.kill(child, received.si_signo)
            code = watch.exit_code(child)
            if code is not None:
                finished = self._words.finished
                if finished is not None and code >= 0 and why != "stopped":  # a stopped child ran on only to be killed
                    return finished
                return Death(code, *(was_at or self._at()), why, seconds)
            if why:
                continue
            is_overdue = asked is not None and asked.look(2 * TICK_S) > GRACE_S
            why, seconds = watch.step(is_overdue=is_overdue)
            why = why or ("outdated" if self._is_outdated() else "")
            if watch.has_long_import():
                self._name_import(child)
            if why:
                was_at = self._at()
                self._end(child)

    def _tell(self, death: Death) -> None:
        """Print the verdicts of a child that died before it could, in another child. A further signal ends this."""
        global may_import
        is_told, is_asked_again = self._told(death)
        if not is_told and not is_asked_again:
            may_import = False
            is_told, _ = self._told(None)  # the first has recorded the death
        if not is_told:
            complain("the verdicts so far could not be printed")

    def _told(self, death: Death | None) -> tuple[bool, bool]:
        """Whether a child could tell the verdicts, and whether a signal came meanwhile."""
        others, is_asked_again = orphans.children(), False
        child = self._fork(death)
        ready = Ready(child)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            received = signal.sigtimedwait((*self._passed_on, signal.SIGCHLD), TICK_S)
            is_asked_again = received is not None and received.si_signo in self._passed_on
            if ready.look(2 * TICK_S) > TELLING_S or is_asked_again:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
        orphans.end(but=others, grace_s=ORPHANS_S)
        return self._words.is_judged, is_asked_again

    def _at(self) -> tuple[str | None, bool]:
        return self._journal.begun, self._words.is_judged

    def _end(self, child: int) -> None:
        """Let the child write its stacks and kill it."""
        with contextlib.suppress(ProcessLookupError):
            self._write_stacks(child)
            os.kill(child, signal.SIGKILL)

    def _write_stacks(self, child: int) -> None:
        """Let the child write its stacks, even while its interpreter is not free. Errors: ProcessLookupError."""
        os.ftruncate(self._stack.fileno(), self._stack.seek(0))
        os.kill(child, STACKS)
        os.kill(child, signal.SIGCONT)
        deadline, written, before = time.monotonic() + STACKS_S, 0, -1
        while time.monotonic() < deadline and not before == written > 0:
            time.sleep(STACKS_S / 50)
            before, written = written, os.fstat(self._stack.fileno()).st_size

    def _name_import(self, child: int) -> None:
        """Say on standard error at which line an import is that takes long."""
        from shardproof.engines.processes import crash  # now: no other command needs it

        with contextlib.suppress(ProcessLookupError):
            self._write_stacks(child)
        self._stack.seek(0)
        line = crash.line_of_running(self._stack.read())
        file = os.path.basename(self._journal.begun or "")
        complain(f"the import of {file} has taken {LONG_IMPORT_S:.0f} s{f', and is at {line}' if line else ''}")

    def _as_asked(self, number: int, death: Death) -> int:
        """End this command as the signal asks, after the child has ended for the same reason."""
        if death.why and not self._journal.has_outcomes:  # else it is in the report
            complain(str(self._cause(death)))
        if number == signal.SIGINT:
            if death.exit_code != INTERRUPTED:  # else the child has printed the sentence
                complain(INTERRUPTED_SENTENCE)
            return INTERRUPTED
        complain(f"ended by {signals.signal_name(number)}; what was not printed was not judged")
        signal.signal(number, signal.SIG_DFL)
        os.kill(self._parent, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        return RANK_FAILED  # not reached

    def _run(self, death: Death | None) -> NoReturn:
        """In the forked process: run the command and exit as a process does after its last line."""
        global table, words, is_over
        status = INTERNAL
        try:
            is_over = self.asked is not None
            signals.asked = self.asked
            orphans.tie(self._parent)
            cause = None if death is None else self._cause(death)
            case = self._words.case
            self._table.clear()
            self._words.clear()
            self._stack.seek(0)
            self._stack.truncate()
            faulthandler.enable(self._stack, all_threads=False)
            faulthandler.register(STACKS, self._stack, all_threads=True)
            table, words, journal.current = self._table, self._words, self._journal
            exits.install(self._words.note)
            signals.raise_when_asked(lambda: self._words.is_asked)
            process_limits.install()
            os.register_at_fork(after_in_child=_disown)
            is_of_a_signal = is_over and death is not None and not death.why  # and not of the code that ran
            if death is not None and death.key is not None and cause is not None and not is_of_a_signal:
                self._journal.lose(death.key, str(cause), None if isinstance(cause, str) else (cause, case))
            self._journal.read()
            status = last_act.recorded(self._call, self._words)
        finally:
            exits.leave(status)

    def _cause(self, death: Death) -> str | RankFailure:
        """The failure of the rank that ran when the process ended, with the states of the others, or a sentence."""
        # Import these only now: the parent of a command without a death needs none of them.
        from shardproof.engines.failure import Died, Stalled
        from shardproof.engines.processes import crash
        from shardproof.engines.processes.root_cause import DIED, RUNNING, Outcome, ending

        self._stack.seek(0)
        written = self._stack.read()
        call, _, place = self._words.noted.partition(" at ")
        line = place or (crash.line_of_running(written) if death.why else crash.line(written))
        at, by = f" at {line}" if line else "", f" by {call}" if call else ""
        statuses = {rank: status for rank in range(self._table.world) if (status := self._table.status(rank)).writes}
        running = next((rank for rank, status in statuses.items() if status.state == COMPUTING), None)
        others = [
            str(Outcome(rank, RUNNING, state=str(status))) for rank, status in statuses.items() if rank != running
        ]
        if death.why == "asked":
            return (
                f"the command was killed because it did not end when it was asked to; it was{at or ' in native code'}"
            )
        if running is None:
            how = _HOW[death.why].format(seconds=death.seconds) if death.why else f"{ending(death.exit_code)}{by}"
            after = ", after all verdicts were printed" if death.is_judged else ""
            return f"the process of the command {how}{at}{after}"
        state = statuses[running].sentence(line)
        if death.why:
            how = f"rank {running} {_HOW[death.why].format(seconds=death.seconds)}: it {state}"
            return Stalled(how, rank=running, source=line, others=others)
        dead = Outcome(
            running, DIED, source=line, state=str(statuses[running]), exit_code=death.exit_code, error=by.strip()
        )
        return Died(str(dead), rank=running, source=line, others=[*others, ADVICE])


_HOW = {
    "stopped": "was stopped by a signal and not continued for {seconds:.0f} s",
    "silent": "has held the interpreter for {seconds:.0f} s, in native code",
    "idle": "has waited for {seconds:.0f} s, in which none of its processes computed",
}


class _Watch:
    """Whether the child is stopped, has missed the beat of a run, or waits for ever.

    A delay of the parent itself does not count. On a terminal a user may have been asked for something,
    as by a debugger, and can end a command that waits.
    """

    def __init__(self, child: int, of_child: LastWords, record: Journal) -> None:
        self._words, self._pulse, self._journal = of_child, of_child.pulse, record
        self._idleness = None if _reads_a_terminal() else Idleness(child)
        self._is_stopped, self._seconds, self._last = False, 0.0, time.monotonic()
        self._key, self._key_s = record.begun, 0.0

    def exit_code(self, child: int) -> int | None:
        """How the child has ended, or None; notes whether it is stopped."""
        while True:
            changed, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not changed:
                return None
            if not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
                return os.waitstatus_to_exitcode(status)
            self._is_stopped, self._seconds = os.WIFSTOPPED(status), 0.0

    def has_long_import(self) -> bool:
        """Whether a file's import takes long; once for each."""
        is_long = self._key_s >= LONG_IMPORT_S and (self._key or "").startswith(journal.IMPORT)
        self._key_s = -math.inf if is_long else self._key_s
        return is_long

    def step(self, *, is_overdue: bool) -> tuple[str, float]:
        """Why the child must be ended, and the seconds since it last moved; an empty string if it need not be."""
        now = time.monotonic()
        elapsed, self._last = min(now - self._last, 2 * TICK_S), now
        key = self._journal.begun
        self._key, self._key_s = key, self._key_s + elapsed if key == self._key else 0.0
        self._seconds += elapsed
        pulse = self._words.pulse
        if pulse != self._pulse and not self._is_stopped:
            self._pulse, self._seconds = pulse, 0.0
        if is_overdue:
            return "asked", self._seconds
        if self._is_stopped:
            return ("stopped", self._seconds) if self._seconds >= STOPPED_S else ("", 0.0)
        _, limit = pulse
        if limit and self._seconds >= limit + MARGIN_S:
            return "silent", self._seconds
        idle = 0.0 if self._idleness is None else self._idleness.look()
        waits_for_users_code = key is not None or self._words.is_judged  # or for its exit functions
        is_late = idle >= IDLE_S + self._words.run_limit and waits_for_users_code
        return ("idle", idle) if is_late else ("", 0.0)


def _reads_a_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:  # closed
        return False


def _disown() -> None:
    """In a process that a user's code forks from the command: it has no verdict to record."""
    global table, words
    table = words = journal.current = None
    signals.end_when_asked()
