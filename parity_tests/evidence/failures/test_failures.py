"""The failure matrix's program, over a few cells of lockstep; the tests of the process engines cover theirs."""

from __future__ import annotations

import html
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parity_tests.evidence.failures import async_kinds, page, stored
from parity_tests.evidence.failures.cells import ENGINES, WORLDS, Cell, _answer, _start, bodies, cells
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


ON = "Written by a test."


def cell_of(run: stored.Run, kind: str, engine: str) -> str:
    """The cell of the page, as it is written."""
    (row,) = [line for line in page.with_sentences(run).splitlines() if f"<summary>{kind}</summary>" in line]
    return row.split("<td>")[2 + ENGINES.index(engine)].partition("</td>")[0]


def shown(cell: str) -> list[tuple[str, str]]:
    """The marks of a cell, each with the text that a click shows."""
    folds = re.findall(r"<summary[^>]*>(.*?)</summary><pre>(.*?)</pre>", cell)
    return [(mark, html.unescape(text)) for mark, text in folds]


def test_a_mark_has_its_sentence_and_a_kind_its_code() -> None:
    row = [Cell("raises", "raised", f"raised: rank 1 raised <KeyError> at {stored.ROOT}a.py:3", 0.251)]
    run = stored.with_cells(None, {("gloo", 2): row}, ON)
    assert shown(cell_of(run, "raises", "gloo")) == [
        ("2 ranks: raised, no operation", "gloo, 2 ranks, after 0.2 s:\nraised: rank 1 raised <KeyError> at a.py:3")
    ]
    assert cell_of(run, "raises", "lockstep") == '<span class="pale">not run</span>'
    assert 'raise KeyError("no such weight")&#10;    dist.all_reduce(' in page.with_sentences(run)
    assert "\n1 kinds of failure in 1 cells: 1 sentence lacks a rank" in page.text(run)


def test_the_committed_page_has_the_marks_of_the_committed_cells() -> None:
    docs = Path(stored.ROOT) / "docs"
    run = stored.read(docs / "failures.json")
    assert run is not None and list(run.cells) == stored.PLACES
    marks = page.text(run)
    assert "<details>" not in marks and (docs / "failures.md").read_text() == marks


def test_one_sentence_of_two_that_differ_by_ranks_alone() -> None:
    def both(*sentences: str) -> list[str]:
        matrix = {
            ("gloo", world): [Cell("raises", "raised", sentence, 0.1)]
            for world, sentence in zip(WORLDS, sentences, strict=True)
        }
        ((_, text),) = shown(cell_of(stored.with_cells(None, matrix, ON), "raises", "gloo"))
        return [line for line in text.splitlines() if line.startswith("gloo")]

    line = "rank {} in send at a.py:3"
    assert both(line.format(1), f"{line.format(3)}\n{line.format(2)}") == ["gloo, 2 and 4 ranks, after 0.1 and 0.1 s:"]
    others = ["gloo, 2 ranks, after 0.1 s:", "gloo, 4 ranks, after 0.1 s:"]
    assert both(line.format(1), f"{line.format(1)}\nrank 2 returned") == others


def test_two_marks_where_the_numbers_of_ranks_differ() -> None:
    matrix = {("torchrun", world): [Cell("loops", cause, cause, 0.1)] for world, cause in ((2, "died"), (4, "stalled"))}
    marks = [mark for mark, _ in shown(cell_of(stored.with_cells(None, matrix, ON), "loops", "torchrun"))]
    assert marks == [
        "2 ranks: died, no rank, no operation, no line",
        "4 ranks: stalled, no rank, no operation, no line",
    ]


def test_cells_that_did_not_run_stay(tmp_path: Path) -> None:
    def row(kind: str, cause: str) -> list[Cell]:
        return [Cell(kind, cause, f"{cause}: ...", 0.1)]

    first = stored.with_cells(None, {("gloo", 2): row("raises", "raised"), ("gloo", 4): row("raises", "done")}, "first")
    stored.write(first, tmp_path / "failures.json")
    before = stored.read(tmp_path / "failures.json")
    assert before == first
    after = stored.with_cells(
        before, {("gloo", 4): row("raises", "died"), ("lockstep", 2): row("loops", "x")}, "second"
    )
    assert {place: cell.cause for place, cell in after.cells.items()} == {
        ("gloo", 2, "raises"): "raised",
        ("gloo", 4, "raises"): "died",
        ("lockstep", 2, "loops"): "x",
    }


def test_a_sentence_is_the_same_on_every_machine() -> None:
    folder = f"{tempfile.gettempdir()}/tmpab12/two/kind.py:3"
    assert (
        stored.everywhere(f"at /opt/venv/lib/python3.11/site-packages/torch/a.py:3, {folder}")
        == "at torch/a.py:3, two/kind.py:3"
    )
    ours = "mismatch  wrong\n2 schemes, 1 mismatch, 0 not run."
    log = "[rank1]:[W1130 10:55:24.28 socket.cpp:469] [c10d] timed out\nE1130 10:55:26.35 1 torch/api.py:1] failed\n"
    list_of_ranks = 'Traceback (most recent call last):\n  File "<frozen runpy>", line 1\n=====\nFAILED\n--\n=====\n'
    assert stored.everywhere(f"{log}{ours}\n{log}{list_of_ranks}") == ours


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
