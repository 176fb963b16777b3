"""Mutants: what the rules make and leave out, that a sample repeats, and how one is judged."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.injected_bugs.injected_bug import ROOT
from parity_tests.mutants import page, places
from parity_tests.mutants.by_tests import _tree_of
from parity_tests.mutants.drawn import AT_IMPORT, DrawnCases
from parity_tests.mutants.mutant import Mutant
from parity_tests.mutants.operators import changes
from parity_tests.mutants.reached import Memory, Reach
from parity_tests.mutants.run import Journal, Outcome, _nearest

PLAIN = "torch_impl/collectives/plain.py"
SUM = "parity_tests.collectives.test_schemes:sum_to_invariant"
RETURNED = "return total.to(x.dtype)"


def code_changes(code):
    """(kind, new text) of every change of a piece of code."""
    return [(kind, new) for node in ast.walk(ast.parse(code)) for kind, _, new in changes(node)]


def mutant_of(old, new):
    """A mutant of the sum in collectives/plain.py."""
    text = (ROOT / PLAIN).read_text()
    start = text.index(old)
    line = 1 + text[:start].count("\n")
    return Mutant(PLAIN, "all_reduce_sum", "arithmetic", len(text[:start].encode()), old, new, line, line)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("a + b", ("arithmetic", "(a - b)")),
        ("a < b", ("comparison", "(a <= b)")),
        ("f(a, b)", ("arguments", "(f(b, a))")),
        ("x.sum(-1)", ("dim", "(x.sum(0))")),
        ("x.softmax(dim=1)", ("dim", "(x.softmax(dim=0))")),
        ("x.amax(1)", ("operation", "(x.amin)")),
        ("x.contiguous()", ("method", "(x)")),
        ("y = g(tp_group)", ("group", "cp_group")),
        ("mesh['tp']", ("group", "'cp'")),
        ("torch.float32", ("dtype", "(torch.bfloat16)")),
        ("if a: return b", ("condition", "(not a)")),
        ("f(x)", ("statement", "pass")),
        ("x = f(x)", ("statement", "pass")),
        ("a if c else b", ("branches", "(b if c else a)")),
        ("not a", ("sign", "a")),
    ],
)
def test_each_rule_makes_its_mistake(code, change):
    text = f"def function():\n    {code}" if "return" in code else code
    kinds = {(kind, new.removeprefix("(").removesuffix(")")) for kind, new in code_changes(text)}
    assert (change[0], change[1].removeprefix("(").removesuffix(")")) in kinds


@pytest.mark.parametrize("code", ["min(a, b)", "torch.maximum(a, b)", "isinstance(a, b)"])
def test_arguments_that_mean_the_same_either_way_are_not_swapped(code):
    assert "arguments" not in {kind for kind, _ in code_changes(code)}


def test_what_is_left_out(monkeypatch):
    code = '''
"""A docstring."""
from functools import cache
BLOCK_BYTES = 2
def f(a: int = 1) -> tuple[3]:
    """Another 4."""
    warnings.warn("one" + "two")
    if a < 0:
        raise ValueError(5 + 6)
    return a
def __repr__(self):
    return 7
'''
    file = ROOT / "torch_impl" / "layouts" / "made_up.py"
    monkeypatch.setattr(Path, "read_text", lambda self: code)
    monkeypatch.setattr(places, "ROOT", ROOT)
    changed = {mutant.old for mutant in places._of_file(file)}
    assert changed == {"1", "a < 0", "0"}


def test_mutants_of_equal_bytecode_are_none():
    assert not places.changes_bytecode(
        mutant_of(RETURNED, f"({RETURNED.removeprefix('return ')})".join(["return ", ""]))
    )
    assert places.changes_bytecode(mutant_of(RETURNED, "return total"))
    assert not places.changes_bytecode(mutant_of(RETURNED, "return total.to("))


def test_a_sample_repeats_and_has_each_component():
    sample = places.sampled(24, 3)
    assert [mutant.key for mutant in sample] == [mutant.key for mutant in places.sampled(24, 3)]
    assert {mutant.component for mutant in sample} == {mutant.component for mutant in places.candidates()}
    assert {mutant.component for mutant in places.sampled(4, 3, "layouts")} == {"layouts"}


def test_what_runs_at_import_is_judged_by_what_uses_it():
    """A default by the schemes that run its function; of a function's body no other line stands in for it."""
    text = (ROOT / PLAIN).read_text().splitlines()
    header = 1 + next(i for i, line in enumerate(text) if line.startswith("def all_reduce_sum"))
    body = 1 + text.index(f"    {RETURNED}")
    default = replace(mutant_of(RETURNED, "return total"), first_line=header, last_line=header)
    runs_it, runs_another = Reach({PLAIN: [body]}, 0.1), Reach({PLAIN: [len(text)]}, 0.1)
    schemes = {"one": runs_it, "another": runs_another}
    assert _nearest(default, schemes) == ["one"]
    assert _nearest(mutant_of(RETURNED, "return total"), {"another": runs_another}) == []
    constant = replace(default, symbol="", first_line=1, last_line=1)
    assert _nearest(constant, schemes) == ["one", "another"]


def test_drawn_cases_catch_a_mutant_and_pass_what_is_none():
    cases = DrawnCases(examples=4)
    caught = cases.judge(mutant_of(RETURNED, "return (total / 2).to(x.dtype)"), [SUM])
    assert (caught["drawn"], caught["examples"]) == ("sum_to_invariant", 1) and "value" in caught["oracle"]
    assert cases.judge(mutant_of(RETURNED, "return total.to(dtype=x.dtype)"), [SUM])["drawn"] is None
    assert cases.judge(mutant_of(RETURNED, "return ("), [SUM])["drawn"] == AT_IMPORT


def test_the_tree_of_a_mutant_is_what_python_imports():
    with _tree_of(mutant_of(RETURNED, "return 17")) as tree:
        program = "import inspect, torch_impl.collectives.plain as p; print(inspect.getsource(p.all_reduce_sum))"
        environment = {"PYTHONPATH": str(tree)}
        done = warm_python.run("-c", program, folder=tree, environment=environment, imported=warm_python.TORCH)
        assert "return 17" in done.stdout, done.stderr
    assert RETURNED in (ROOT / PLAIN).read_text()


def test_a_run_goes_on_where_it_was_stopped():
    mutant = mutant_of(RETURNED, "return total")
    journal = Journal(Path("build") / "mutants.jsonl")
    journal.add({"key": mutant.key, "schemes": 1, "examples": 4, "drawn": None, "oracle": None})
    assert journal.outcomes([mutant]) == []
    journal.add({"key": mutant.key, "tests": "parity_tests/collectives/test_schemes.py"})
    (outcome,) = Journal(journal.path).outcomes([mutant])
    assert (outcome.drawn, outcome.tests) == (None, "parity_tests/collectives/test_schemes.py")


def test_what_is_reached_is_remembered_while_the_text_is_the_same():
    reach = Reach({PLAIN: [1, 2]}, 0.5)
    memory = Memory(Path("lines.json"))
    assert memory.of("a", "text", lambda: reach) == reach
    assert Memory(Path("lines.json")).of("a", "text", pytest.fail) == reach
    assert memory.of("a", "another text", lambda: replace(reach, seconds=2.0)).seconds == 2.0
    assert not reach.reaches(mutant_of(RETURNED, "return total"))


def test_the_page_counts_by_component_and_lists_survivors(monkeypatch):
    mutant = mutant_of(RETURNED, "return total")
    caught, by_tests = Outcome(mutant, 1, 1, "a", "value", None), Outcome(mutant, 1, 4, None, None, "test_a.py")
    survivor = Outcome(mutant, 0, 0, None, None, None)
    outcomes = [caught, by_tests, survivor]
    assert "| collectives | 3 | 1 of 3 (33.3%) | 2 of 3 (66.7%) | 1 | 0 |" in page.table(outcomes)
    assert page.survivors(outcomes).startswith(f"- `{PLAIN}:{mutant.first_line}`, `all_reduce_sum`, arithmetic: ")
    assert not page.is_promised(outcomes) and "the promise is made of 1000" in page.closing(outcomes)[0]
    monkeypatch.setattr("parity_tests.mutants.run.why_equivalent", lambda mutant: "no caller sees it")
    assert page.table(outcomes).splitlines()[-1].endswith("| 0 | 1 |")
    page.write(outcomes, Path("mutants.md"), 0, 16, 10)
    assert "Equivalent: no caller sees it" in Path("mutants.md").read_text()
    assert json.dumps(mutant.to_dict())
