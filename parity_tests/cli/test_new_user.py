"""What a new user runs into in the first hour: each is one sentence that helps, and costs no other verdict."""

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from parity_tests.cli import session
from parity_tests.harness.declare import discover
from parity_tests.harness.report import summary
from parity_tests.harness.run.failure import Raised
from parity_tests.specimens.user_files import RIGHT, WRONG, written

NARROW = 80
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
    return x * scale * (3 if scale > 3 and len(x) > 1 else 1)
declare(late, reference=lambda x, scale: x * scale, options={"scale": (1.0, 2.0, 3.0, 4.0)}, dims={"b": (4, 8, 16)})
"""
RENAMED = "def {name}(mesh, x):\n    return x * {factor}\ndeclare({name})\n"
TRANSPOSED = """
def product(mesh, x, weight):
    return x @ weight
declare(product, reference=lambda x, weight: x @ weight.T, inputs={"x": "b/tp i", "weight": "o i tp=R"},
        outputs="b/tp o", draw={}, dims={"i": (3,), "o": (2,)})
"""


def closing(out):
    return out.rstrip().splitlines()[-1]


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
    assert closing(out) == "2 schemes, 1 mismatch, 0 not run, 1 not judged."
    record = json.loads(Path("out.json").read_text())
    assert [report["verdict"] for report in record["reports"]] == ["equal", "mismatch"]
    assert list(record["not_judged"]) == [name]
    assert ElementTree.parse("out.xml").getroot().get("errors") == "1"
    written("two.py", mistake, RIGHT)
    assert shardproof("verify", "two.py", "--examples", "3")[0] == 2


def test_of_one_scheme_it_is_one_sentence_and_the_json(shardproof):
    written("alone.py", UNUSABLE)
    status, out, err = shardproof("verify", "alone.py", "--examples", "3", "--json", "out.json")
    assert (status, out) == (2, "") and err.startswith("shardproof: scheme 'unusable': ")
    assert json.loads(Path("out.json").read_text())["status"] == 2


def test_a_terminal_of_80_columns_is_kept(monkeypatch):
    name = "a_scheme_whose_name_is_as_long_as_a_name_of_ours_may_be"
    longer = [RENAMED.format(name=f"{name}_{factor}", factor=factor) for factor in (2, 3)]
    file = written("narrow.py", *longer, UNUSABLE)
    outcome = session.run(discover.schemes_of_file(file), session.VerifyOptions(examples=4, quiet=True))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=NARROW, color_system=None, legacy_windows=False)
    summary.show(console, outcome, session.VerifyOptions())
    lines = out.getvalue().splitlines()
    assert [line for line in lines if len(line.rstrip()) > NARROW] == []
    head, right, wrong = lines[:3]
    assert "scheme" in head and "verdict" in head
    assert f"{name}_2" in right and "equal" in right and f"{name}_3" in wrong and "mismatch" in wrong
    assert not any("…" in line for line in lines)


def test_examples_are_those_that_are_drawn(shardproof):
    written("late.py", LATE)
    _, out, _ = shardproof("verify", "late.py", "--examples", "8", "--json", "out.json")
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
    others = [f"rank 1 {sentence}", f"rank 2 {sentence}", "rank 3 finished"]
    failure = Raised(f"rank 0 {sentence}", rank=0, others=others)
    assert str(failure).splitlines() == [f"raised: rank 0 {sentence}", "  ranks 1, 2 do the same", "  rank 3 finished"]
