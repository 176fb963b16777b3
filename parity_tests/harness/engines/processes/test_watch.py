"""No progress: the status table and the processor time of ranks."""

from __future__ import annotations

import importlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardproof.engines.ledger import line_of_thread
from shardproof.engines.processes.root_cause import DONE, Outcome
from shardproof.engines.processes.status_table import COMPUTING, FINISHED, SLOT, TEXT, WAITING, StatusTable
from shardproof.engines.processes.watch import RankHandle, Watch, _demands, _Stillness


def most_idle_seconds(code: str) -> float:
    """The longest time without work in a second beside a process that runs this code."""
    table = StatusTable(None, 2)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        still, last, most = _Stillness(table), time.monotonic(), 0.0
        for _ in range(20):
            time.sleep(0.05)
            still.step(time.monotonic() - last, [SimpleNamespace(pid=process.pid)])
            last, most = time.monotonic(), max(most, still.idle_seconds)
        process.kill()
    assert still.seconds >= 1
    return most


@pytest.mark.slow
def test_a_rank_at_work_is_not_idle() -> None:
    assert most_idle_seconds("print(1, flush=True)\nwhile True: pass") == 0


LOOKING = """
import threading, time
def looks():
    while True:
        time.sleep(0.005)
for _ in range(12):
    threading.Thread(target=looks, daemon=True).start()
print(1, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", ["import time\nprint(1, flush=True)\ntime.sleep(60)", LOOKING])
def test_a_rank_asleep_is_idle_also_if_each_of_its_groups_looks_for_messages(code: str) -> None:
    assert most_idle_seconds(code) > 0  # not the whole second: a thread that waits for a busy processor counts as work


def test_a_rank_that_ends_while_its_threads_are_listed_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(folder: str) -> list[str]:
        raise ProcessLookupError(folder)

    assert _demands([SimpleNamespace(pid=os.getpid())])
    monkeypatch.setattr(os, "listdir", ended)
    assert _demands([SimpleNamespace(pid=os.getpid())]) == {}


def test_a_change_on_the_board_starts_the_clock_anew() -> None:
    table = StatusTable(None, 2)
    still = _Stillness(table)
    still.step(1.0, [])
    table.slot(1).enter(WAITING)
    still.step(1.0, [])
    assert (still.seconds, still.idle_seconds) == (0.0, 0.0)
    still.step(1.0, [])
    still.step(1.0, [])
    # Idle only from the second step on, which compares with the first.
    assert (still.seconds, still.idle_seconds) == (2.0, 1.0)


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_a_rank_that_is_killed_in_the_middle_of_its_message_is_gone(pieces: int) -> None:
    ours, theirs = socket.socketpair()
    work = Connection(ours.detach())
    handle = RankHandle(0, os.getpid(), work, work, Path())
    for piece in (struct.pack("!i", 100), b"the first bytes")[:pieces]:
        theirs.sendall(piece)
    theirs.close()
    watch = Watch([handle], None, StatusTable(None, 1))
    watch._hear(handle)
    assert handle.is_gone and handle.outcome is None
    handle.close()


class LeavesTheCompiler(RankHandle):
    """A rank that ends while it is asked whether it compiles."""

    def __init__(self, table: StatusTable) -> None:
        ours, theirs = socket.socketpair()
        self._slot, self._theirs = table.slot(0), Connection(theirs.detach())
        super().__init__(0, os.getpid(), *[Connection(ours.detach())] * 2, Path())
        self._slot.enter(COMPUTING)
        self._theirs.send("ready")

    def is_compiling(self) -> bool:
        self._slot.enter(FINISHED)
        self._theirs.send(Outcome(0, DONE, (), b"its result"))
        return False


def test_a_rank_that_leaves_the_compiler_as_it_is_asked_is_waited_for() -> None:
    table, (silent, other) = StatusTable(None, 1), socket.socketpair()
    server = SimpleNamespace(fileno=silent.fileno, exit_code=lambda pid: None)
    handle = LeavesTheCompiler(table)
    outcomes, quiet = Watch([handle], server, table).outcomes(quiet_s=0.2)
    assert quiet is None
    assert [each.result for each in outcomes] == [b"its result"]
    for each in (handle, silent, other):
        each.close()


def test_a_slot_holds_the_last_collective_and_no_more_than_its_size() -> None:
    table = StatusTable(None, 2)
    assert str(table.status(1)) == "starts"
    first, second = table.slot(0), table.slot(1)
    second.issue("", COMPUTING)
    assert str(table.status(1)) == "computes, nothing issued yet"
    first.issue("x" * 2 * SLOT)
    second.issue("all_reduce float32[3]")
    assert str(table.status(1)) == "waits in all_reduce float32[3]"
    second.enter(COMPUTING)
    assert str(table.status(1)) == "computes; its last was all_reduce float32[3]"
    assert table.status(1).sentence("a.py:3") == "computes at a.py:3; its last was all_reduce float32[3]"
    assert len(table.status(0).text) < TEXT
    assert (table.rows(0), table.rows(1)) == ((), ("all_reduce float32[3]",))
    assert table.writes() == (1, 3)


def test_a_row_that_was_not_written_to_its_end_is_not_read() -> None:
    table = StatusTable(None, 1)
    table.slot(0).issue("all_reduce float32[3]")
    table._memory[TEXT : TEXT + 8] = bytes(8)
    assert table.rows(0) == ()


def test_a_threads_line_is_the_users() -> None:
    entered, stop = threading.Event(), threading.Event()

    def waits() -> None:
        entered.set()
        stop.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    entered.wait()
    first = waits.__code__.co_firstlineno
    assert line_of_thread(thread.ident) in (f"test_watch.py:{first + 1}", f"test_watch.py:{first + 2}")
    stop.set()
    thread.join()
    assert line_of_thread(None) is None


def test_an_importing_threads_line_is_the_import(tmp_path, monkeypatch) -> None:
    """It is the user's import, not one inside the package; None if no line is the user's."""
    events = SimpleNamespace(entered=threading.Event(), stop=threading.Event())
    monkeypatch.setitem(sys.modules, "import_events", events)
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("slow_package", "slow_again"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"from {package} import inner\n")
        (tmp_path / package / "inner.py").write_text(
            "import import_events\nimport_events.entered.set()\nimport_events.stop.wait()\n"
        )

    def imports() -> None:
        __import__("slow_package")

    lines = []
    for target, arguments in ((imports, ()), (importlib.import_module, ("slow_again",))):
        events.entered.clear(), events.stop.clear()
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        events.entered.wait()
        lines.append(line_of_thread(thread.ident))
        events.stop.set()
        thread.join()
    assert lines == [f"test_watch.py:{imports.__code__.co_firstlineno + 1}", None]
