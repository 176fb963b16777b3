"""Mistakes of a new user's first hour: each gets one helpful sentence, and other verdicts remain."""

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from parity_tests.specimens.user_files import LOCKSTEP, RIGHT, WRONG, written
from shardproof.cli import session
from shardproof.declare import discover
from shardproof.engines.failure import Raised
from shardproof.report import summary

NARROW = 80
LONG = "a_scheme_whose_name_is_as_long_as_a_name_of_ours_may_be"
UNUSABLE = """
def absent(x):
    return no_such_name * x
def unusable(mesh, x):
    return x * 2
declare(unusable, reference=absent)
"""
UNCOMPARED = """
def uncompared(mesh, x):
    return x * float("nan")
declare(uncompared, reference=lambda x: x * jnp.nan)
"""
OF_LAYOUT = """
def of_layout(mesh, x):
    return x * 2
declare(of_layout, inputs={"x": "b/tp:own"}, outputs="b/tp:own", layouts={"own": lambda size, world: no_such_name})
"""
OF_COST = """
def of_cost(mesh, x):
    return x * 2
declare(of_cost, cost=lambda case: no_such_name)
"""
LATE = """
def late(mesh, x, scale):
    return x * scale * (mesh.size("tp") if scale > 3 and len(x) > 1 else 1)
declare(late, reference=lambda x, scale: x * scale, options={"scale": (1.0, 2.0, 3.0, 4.0)}, dims={"b": (4, 8, 16)})
"""
RENAMED = "def {name}(mesh, x):\n    return {returned}\ndeclare({name})\n"
TRANSPOSED = """
def product(mesh, x, weight):
    return x @ weight
declare(product, reference=lambda x, weight: x @ weight.T, inputs={"x": "b/tp i", "weight": "o i tp=R"},
        outputs="b/tp o", draw={}, dims={"i": (3,), "o": (2,)})
"""


def closing(out):
    return out.rstrip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "name"),
    [(UNUSABLE, "unusable"), (UNCOMPARED, "uncompared"), (OF_LAYOUT, "of_layout"), (OF_COST, "of_cost")],
    ids=["raises", "NaN", "layout", "cost"],
)
def test_a_declaration_that_cannot_be_used_costs_its_scheme_alone(mistake, name, shardproof):
    written("three.py", mistake, RIGHT, WRONG)
    run = ("verify", "three.py", "--examples", "3", "--json", "out.json", "--junit", "out.xml")
    status, out, _ = shardproof(*run)
    assert status == 1
    assert f"not judged: scheme '{name}': " in out
    assert closing(out) == "3 schemes, 1 mismatch, 0 not run, 1 not judged."
    record = json.loads(Path("out.json").read_text())
    assert [report["verdict"] for report in record["reports"]] == ["equal", "mismatch"]
    assert list(record["not_judged"]) == [name]
    assert ElementTree.parse("out.xml").getroot().get("errors") == "1"
    written("two.py", mistake, RIGHT)
    assert shardproof("verify", "two.py", "--examples", "3")[0] == 2


def test_a_single_scheme_prints_one_sentence_and_the_json(shardproof):
    written("alone.py", UNUSABLE)
    status, out, err = shardproof("verify", "alone.py", "--examples", "3", "--json", "out.json")
    assert (status, out) == (2, "") and err.startswith("shardproof: scheme 'unusable': ")
    assert json.loads(Path("out.json").read_text())["status"] == 2


def shown(outcome, **of_console):
    out = io.StringIO()
    summary.show(Console(file=out, color_system=None, **of_console), outcome, session.VerifyOptions())
    return out.getvalue().splitlines()


@pytest.fixture(scope="module")
def outcome_of_long_names(tmp_path_factory):
    right, wrong = "x * 2", "x * 2 * mesh.size('tp')"
    longer = [RENAMED.format(name=f"{LONG}_{number}", returned=each) for number, each in ((2, right), (3, wrong))]
    file = tmp_path_factory.mktemp("narrow") / "narrow.py"
    written(str(file), *longer, UNUSABLE, **LOCKSTEP)
    return session.run(discover.schemes_of_file(str(file)), session.VerifyOptions(examples=4, quiet=True))


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("width", [NARROW, 81, 92, 100, 113, 140, 200])
def test_the_verdict_is_first_and_uncut_at_any_width(outcome_of_long_names, width, is_terminal):
    lines = shown(outcome_of_long_names, force_terminal=is_terminal, width=width, legacy_windows=False)
    if not is_terminal:  # reports and sentences of a file are not broken: they are searched
        lines = lines[:3]
    assert [line for line in lines if len(line.rstrip()) > width] == []
    head, right, wrong = lines[:3]
    assert head.split()[:2] == ["verdict", "scheme"]
    assert right.split()[:2] == ["equal", f"{LONG}_2"] and wrong.split()[:2] == ["mismatch", f"{LONG}_3"]
    assert not any("…" in line for line in lines)


def test_a_mesh_is_cut_before_a_column_is_left_out(outcome_of_long_names):
    outcome = copy.copy(outcome_of_long_names)
    meshes = tuple(f"dp_replicate={n},dp_shard={n},cp={n},tp={n}" for n in range(1, 5))
    outcome.reports = [replace(report, meshes=meshes) for report in outcome.reports]
    full, cut = shown(outcome, width=260), shown(outcome, width=165)
    mesh = "dp_replicate=1,2,3,4 dp_shard=1,2,3,4 cp=1,2,3,4 tp=1,2,3,4"
    assert full[1].endswith(mesh) and full[0].split() == cut[0].split()
    assert len(cut[1]) == 165 and cut[1].endswith("…")


@pytest.mark.slow
def test_a_file_gets_the_columns_that_fit_into_80(shardproof, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    written("both.py", RIGHT, WRONG)
    arguments = ("verify", "both.py", "--examples", "3")
    narrow = shardproof(*arguments)[1].splitlines()
    assert narrow[0].startswith("verdict   scheme ") and max(map(len, narrow[:3])) <= NARROW
    assert narrow[1].startswith("equal     right ") and narrow[2].startswith("mismatch  wrong ")
    monkeypatch.setenv("COLUMNS", "200")
    assert shardproof(*arguments)[1].splitlines()[0].split()[-1] == "mesh"


def test_the_count_of_examples_leaves_out_shrinking_steps(shardproof):
    written("late.py", LATE, **LOCKSTEP)
    _, out, _ = shardproof("verify", "late.py", "--mesh", "tp=2", "--examples", "8", "--json", "out.json")
    (report,) = json.loads(Path("out.json").read_text())["reports"]
    assert report["examples"] <= 8 < report["examples"] + report["shrinking_steps"]
    assert f"and {report['shrinking_steps']} shrinking steps" in out.splitlines()[0]


def test_a_function_that_raises_is_shown_with_its_shards(shardproof):
    written("transposed.py", TRANSPOSED)
    status, out, _ = shardproof("verify", "transposed.py", "--mesh", "tp=2", "--dim", "b=4")
    assert status == 3
    assert "  rank 0 has x (2,3) of 'b/tp i', weight (2,3) of 'o i tp=R'" in out.splitlines()


def test_a_sentence_that_each_rank_raises_is_printed_once():
    sentence = "raised RuntimeError: need to convert all torch.Tensor to DTensor"
    others = [f"rank 1 {sentence}", f"rank 2 {sentence}", "rank 3 returned"]
    failure = Raised(f"rank 0 {sentence}", rank=0, others=others)
    assert str(failure).splitlines() == [f"raised: rank 0 {sentence}", "  ranks 1, 2 do the same", "  rank 3 returned"]
