"""The failure matrix's program, over a few cells of lockstep; those of processes are rows of their engines' tests."""

from __future__ import annotations

import sys

import pytest

from parity_tests.evidence.failures import page
from parity_tests.evidence.failures.cells import Cell, bodies, cells


@pytest.mark.slow
def test_a_few_cells() -> None:
    dead, equal, odd = cells("lockstep", 2, ["is_killed", "prints_much", "other_shape"])
    assert (dead.cause, dead.lacks) == ("died", [])
    killed, waits, advice = dead.sentence.splitlines()
    assert killed == "died: rank 1 was killed by SIGKILL; it was last seen so: computes, nothing issued yet"
    assert waits.startswith("  rank 0 waits in all_reduce float32[3] SUM (group tp, #0) at kinds.py:")
    assert advice == "  --engine gloo runs each rank in a process of its own"
    assert (equal.cause, equal.lacks) == ("done", [])
    assert odd.cause == "collective mismatch" and odd.lacks == []
    assert odd.sentence.startswith("collective mismatch: shapes differ, [3] and [2]: rank 0 in all_reduce float32[3]")


def test_a_wrong_return_value_needs_the_rank_alone() -> None:
    assert Cell("returns_none", "raised", "rank 1 returned NoneType", 0.1).lacks == []
    assert Cell("raises", "raised", "rank 1 raised KeyError at a.py:3", 0.1).lacks == ["operation"]


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun() -> None:
    raised, dead = cells_of_torchrun = cells("torchrun", 2, ["raises", "is_killed"])
    assert [cell.lacks for cell in cells_of_torchrun] == [[], []]
    assert (raised.cause, dead.cause) == ("raised", "ended")
    assert "torchrun ends this job; of rank 1 there is no answer; rank 0 " in dead.sentence


def test_a_command_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr("parity_tests.evidence.failures.cells.LIMIT_S", 0.5)
    monkeypatch.setattr("parity_tests.evidence.failures.cells._command", lambda engine, world: sleeps)
    (silent,) = cells("torchrun", 2, ["raises"])
    assert silent.cause == "ended" and silent.seconds < 10
    assert silent.sentence == "the process of the command was ended after 0.5 s without an answer"


def test_the_page() -> None:
    row = [Cell("raises", "raised", f"rank 1 raised KeyError at {page.ROOT}a.py:3", 0.25)]
    matrix = {("gloo", 2): row, ("lockstep", 4): row}
    lines = page.summary(matrix).splitlines()
    assert lines[-3] == "| kind | gloo, 2 ranks | lockstep, 4 ranks |"
    assert lines[-1] == "| raises | raised; no operation | raised; no operation |"
    printed = page.sentences(matrix).splitlines()
    assert printed.count("rank 1 raised KeyError at a.py:3") == 2
    assert '        raise KeyError("no such weight")' in printed


def test_there_are_thirty_kinds() -> None:
    assert len(bodies()) >= 30
