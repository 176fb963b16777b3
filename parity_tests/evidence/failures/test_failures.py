"""The failure matrix's program, over a few cells of lockstep; the tests of the process engines cover theirs."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parity_tests.evidence.failures import async_kinds, page
from parity_tests.evidence.failures.cells import Cell, _answer, _start, bodies, cells
from shardproof import verify_one_case
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.failure import NotRun


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


def test_a_kind_that_could_not_run_has_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, **__: Any) -> None:
        raise NotRun("a rank still hangs")

    monkeypatch.setattr(verify_one_case, "verify_case", hangs)
    with pytest.raises(NotRun):
        _answer("lockstep", 2, "returns_none")


# Kinds on which engines used to disagree, and their causes on lockstep and on gloo.
ALIKE = {
    "never_waits_in_place": ("protocol", "protocol"),
    "keeps_what_it_never_waits_for": ("protocol", "protocol"),
    "never_waits_for_a_send": ("protocol", "protocol"),
    "never_waits_for_one_of_a_batch": ("protocol", "protocol"),
    "group_of_one_rank_alone": ("deadlock", "collective mismatch"),
    "group_that_lists_its_ranks_in_another_order": ("done", "done"),  # torch sorts them
    "group_of_its_members_alone": ("collective mismatch", "collective mismatch"),
    "groups_in_another_order": ("collective mismatch", "collective mismatch"),
    "mesh_of_one_rank_alone": ("collective mismatch", "collective mismatch"),
    "group_that_is_destroyed": ("raised", "raised"),
    "float8_sum": ("protocol", "raised"),
    "batch_of_messages_of_other_sizes": ("collective mismatch", "collective mismatch"),
}


# gloo drops a message if its Work is destroyed before it is sent, and then the receiver waits for ever.
DROPPED = {"never_waits_for_a_send": "stalled"}
WITHIN_S, LOOP_S = 5.0, 0.1


def load() -> float:
    """The seconds that a second of this process's work takes now: 1 on a quiet machine."""
    wall, own = time.monotonic(), time.process_time()
    while time.process_time() - own < LOOP_S:
        pass
    return max((time.monotonic() - wall) / LOOP_S, 1.0)


@pytest.mark.parametrize(("place", "engine"), [(0, "lockstep"), (1, "gloo")])
def test_what_no_engine_lets_pass(place: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which none of these kinds ends."""
    monkeypatch.setattr(async_kinds, "KEPT", [])  # it would hold lockstep's and travel to gloo's ranks
    _start(engine, 2)
    before = load()
    found = [_answer(engine, 2, kind) for kind in ALIKE]
    limit = WITHIN_S * max(before, load())
    also = DROPPED if engine == "gloo" else {}
    wrong = [cell for cell in found if cell.cause not in (ALIKE[cell.kind][place], also.get(cell.kind))]
    assert [(cell.kind, cell.cause) for cell in wrong] == []
    assert [(cell.kind, cell.lacks, cell.seconds) for cell in found if cell.lacks or cell.seconds > limit] == []


def test_groups_that_all_ranks_make_are_no_rows_of_the_ledger() -> None:
    def makes(mesh: Any, case: Any) -> int:
        dist.new_group([1])
        alone = dist.new_group([mesh.rank("tp")], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=alone)
        init_device_mesh("cpu", (1, mesh.size("tp")), mesh_dim_names=("a", "b"))
        return alone.size()

    for engine in ("lockstep", "gloo"):
        made = run(makes, CaseSpec("groups", {"tp": 2}, engine=engine), engine)
        assert made.results == (1, 1) and [row.op for row in made.ledger.rows] == ["all_reduce"] * 2


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun() -> None:
    raised, dead = cells_of_torchrun = cells("torchrun", 2, ["raises", "is_killed"])
    assert [cell.lacks for cell in cells_of_torchrun] == [[], []]
    assert (raised.cause, dead.cause) == ("raised", "died")
    died, left = dead.sentence.splitlines()
    assert died == "died: rank 1 ended without a word; it was last seen so: computes, nothing issued yet"
    assert left.startswith("  rank 0 ") and " all_reduce float32[3] SUM (group tp, #0) at kinds.py:" in left


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


def test_a_page_keeps_the_cells_that_did_not_run() -> None:
    def row(*causes: str) -> list[Cell]:
        return [Cell(kind, cause, "", 0.1) for kind, cause in zip(("raises", "is_killed"), causes, strict=False)]

    before = page.summary({("gloo", 2): row("done", "done"), ("lockstep", 4): row("done", "done")})
    assert before == page.summary({}, before)
    after = page.summary({("lockstep", 4): row("done", "done")[1:], ("torchrun", 2): row("done")}, before)
    assert after.splitlines()[-4:] == [
        "| kind | gloo, 2 ranks | lockstep, 4 ranks | torchrun, 2 ranks |",
        "| --- | --- | --- | --- |",
        "| raises | done | done | done |",
        "| is killed | done | done | not run |",
    ]


def test_what_is_declared_outside_the_ranks_needs_a_line_alone() -> None:
    assert Cell("reference_exits", "not judged", "reference exits raised SystemExit at a.py:3: 0", 0.1).lacks == []
    assert Cell("reference_exits", "not judged", "reference exits raised SystemExit", 0.1).lacks == ["line"]


def test_a_command_without_a_verdict_says_why() -> None:
    kind, sentence = "two_helpers_of_one_name", "shardproof: cannot import two/kind.py: ImportError: another module"
    assert Cell(kind, "not judged", f"W1130 Sending\n{sentence}", 0.1).lacks == []
    assert Cell(kind, "not judged", "W1130 Sending\n", 0.1).lacks == ["verdict"]
    assert Cell(kind, "done", "", 0.1).lacks == ["verdict"]
    assert Cell("closes_standard_output", "not judged", "shardproof: cannot", 0.1).lacks == ["verdict"]


def test_there_are_sixty_kinds() -> None:
    assert len(bodies()) >= 60
