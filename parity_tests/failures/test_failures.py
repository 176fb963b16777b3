"""The failure matrix's program, over a few cells of lockstep; those of processes are rows of their engines' tests."""

from __future__ import annotations

from parity_tests.failures import page
from parity_tests.failures.cells import Cell, bodies, cells


def test_a_few_cells() -> None:
    dead, equal, odd = cells("lockstep", 2, ["is_killed", "prints_much", "other_shape"])
    assert (dead.cause, dead.sentence) == ("ended", "the process of the command was killed by SIGKILL")
    assert dead.lacks == ["rank", "operation", "line"]
    assert (equal.cause, equal.lacks) == ("done", [])
    assert odd.cause == "collective mismatch" and odd.lacks == []
    assert odd.sentence.startswith("collective mismatch: shapes differ, [3] and [2]: rank 0 in all_reduce float32[3]")


def test_a_wrong_return_value_needs_the_rank_alone() -> None:
    assert Cell("returns_none", "raised", "rank 1 returned NoneType", 0.1).lacks == []
    assert Cell("raises", "raised", "rank 1 raised KeyError at a.py:3", 0.1).lacks == ["operation"]


def test_the_page() -> None:
    row = [Cell("raises", "raised", f"rank 1 raised KeyError at {page.ROOT}a.py:3", 0.25)]
    lines = page.text({("gloo", 2): row, ("lockstep", 4): row}).splitlines()
    assert "| kind | gloo, 2 ranks | lockstep, 4 ranks |" in lines
    assert "| [raises](#raises) | raised; no operation | raised; no operation |" in lines
    assert "rank 1 raised KeyError at a.py:3" in lines
    assert '        raise KeyError("no such weight")' in lines


def test_there_are_thirty_kinds() -> None:
    assert len(bodies()) >= 30
