"""Mutants: the changes that rules make and leave out, that a sample repeats, and how a mutant is judged."""

import ast
import gc
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from parity_tests import warm_python
from parity_tests.evidence.injected_bugs.injected_bug import ROOT
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants import equivalents, page, places
from parity_tests.evidence.mutants import mutant as mutant_module
from parity_tests.evidence.mutants.by_tests import CAP_S, Failure, TestRuns, reaching, tree_of
from parity_tests.evidence.mutants.case_lines import masks_of
from parity_tests.evidence.mutants.drawn import AT_IMPORT, DrawnCases
from parity_tests.evidence.mutants.judged import equivalent
from parity_tests.evidence.mutants.mutant import Mutant, changed
from parity_tests.evidence.mutants.operators import changes
from parity_tests.evidence.mutants.outcomes import Outcome, outcomes, without_cases, without_tests
from parity_tests.evidence.mutants.reached import CaseReach, Memory, TestReach, _of_file, of_tests
from parity_tests.evidence.mutants.run import BATCH, _nearest, batches
from parity_tests.evidence.page import with_section
from parity_tests.evidence.workers import Workers

PLAIN = "torch_impl/collectives/plain.py"
SUM = "parity_tests.collectives.test_schemes:sum_to_invariant"
SUM_FILE = "parity_tests/collectives/test_all_reduce.py"
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


def test_places_that_are_left_out(monkeypatch):
    code = '''
"""A docstring."""
from functools import cache
BLOCK_BYTES = 2
def f(a: int = 1) -> tuple[3]:
    """Another 4."""
    warnings.warn("one" + "two")
    if a < 0:
        raise ValueError(5 + 6)
    with torch.cuda.device(8):
        torch.cuda.manual_seed(9)
    return a
def __repr__(self):
    return 7
'''
    file = ROOT / "torch_impl" / "layouts" / "made_up.py"
    monkeypatch.setattr(Path, "read_text", lambda self: code)
    monkeypatch.setattr(places, "ROOT", ROOT)
    changed = {mutant.old for mutant in places._file_mutants(file)}
    assert changed == {"1", "a < 0", "0"}


def test_exceptions_for_cuda_are_named_in_the_rules():
    """No other function has such a block than the one on the page."""
    files = [path for path in (ROOT / "torch_impl").rglob("*.py") if "with torch.cuda.device(" in path.read_text()]
    (rule,) = [rule for rule in places.RULES if "torch.cuda.device" in rule]
    assert [path.relative_to(ROOT).as_posix() for path in files] == ["torch_impl/parallelizer/adapters/meta_init.py"]
    assert "`_seed_generators`" in rule and "torch_impl.parallelizer.adapters.meta_init" in rule


def test_mutants_of_equal_bytecode_are_none():
    assert not places.changes_bytecode(
        mutant_of(RETURNED, f"({RETURNED.removeprefix('return ')})".join(["return ", ""]))
    )
    assert places.changes_bytecode(mutant_of(RETURNED, "return total"))
    assert not places.changes_bytecode(mutant_of(RETURNED, "return total.to("))


@pytest.mark.slow
def test_a_sample_repeats_and_has_each_component():
    sample = places.sampled(24, 3)
    assert [mutant.key for mutant in sample] == [mutant.key for mutant in places.sampled(24, 3)]
    assert {mutant.component for mutant in sample} == {mutant.component for mutant in places.candidates()}
    assert {mutant.component for mutant in places.sampled(4, 3, "layouts")} == {"layouts"}


@pytest.mark.slow
def test_a_change_of_other_lines_leaves_sample_and_outcomes_as_they_were(monkeypatch, tmp_path):
    def named(root):
        monkeypatch.setattr(places, "ROOT", root)
        monkeypatch.setattr(mutant_module, "ROOT", root)
        sample = places.sampled(200, 0, "collectives")
        return {(mutant.file, mutant.symbol, mutant.place): mutant.key for mutant in sample}

    shutil.copytree(ROOT / "torch_impl" / "collectives", tmp_path / "torch_impl" / "collectives")
    before = named(ROOT)
    plain = tmp_path / PLAIN
    plain.write_text(plain.read_text().replace(RETURNED, f"x = x\n    {RETURNED}"))
    after = named(tmp_path)
    assert len(before.keys() & after.keys()) >= len(before) - 1
    assert {symbol for (_, symbol, _), _ in before.items() & after.items()} > {"all_reduce_max"}
    other_keys = {place for place in before.keys() & after.keys() if before[place] != after[place]}
    assert {symbol for _, symbol, _ in other_keys} == {"all_reduce_sum"}


def test_a_line_of_import_is_judged_by_its_users():
    """A default by the schemes that run its function, a constant by those that run its file."""
    text = (ROOT / PLAIN).read_text().splitlines()
    header = 1 + next(i for i, line in enumerate(text) if line.startswith("def all_reduce_sum"))
    body = 1 + text.index(f"    {RETURNED}")
    default = replace(mutant_of(RETURNED, "return total"), first_line=header, last_line=header)
    runs_it, runs_another = CaseReach({PLAIN: {f"{body}": 0b101}}), CaseReach({PLAIN: {f"{len(text)}": 1}})
    schemes = {"one": runs_it, "another": runs_another}
    assert _nearest(default, schemes) == {"one": [0, 2]}
    assert _nearest(mutant_of(RETURNED, "return total"), {"another": runs_another}) == {}
    constant = replace(default, symbol="", first_line=1, last_line=1)
    assert list(_nearest(constant, schemes)) == ["one", "another"]


def test_a_line_that_is_not_counted_is_judged_by_the_cases_that_run_its_statement(monkeypatch):
    code = "def all_reduce_sum(x):\n    if (\n        x\n    ):\n        return f(x,\n            2)\n    return 1\n"
    monkeypatch.setattr(Path, "read_text", lambda self: code)

    def cases(line, *lines):
        mutant = replace(mutant_of("2", "3"), first_line=line, last_line=line)
        return _nearest(mutant, {"scheme": CaseReach({PLAIN: {str(number): 0b10 for number in lines}})})

    assert cases(6, 5) == cases(6, 5, 6) == {"scheme": [1]} == cases(3, 2)
    assert cases(6, 2) == cases(6, 7) == cases(3, 5) == {}


@pytest.mark.slow
def test_cases_have_the_lines_that_their_ranks_run():
    """Ranks are threads. Of a function that another scheme runs, they have none."""
    keys = [SUM, SUM.replace("sum_to_invariant", "maximum")]
    total, maximum = (CaseReach(masks).masks for masks in Workers(1).call(masks_of, keys, 3).values())
    line = str(mutant_of(RETURNED, "return total").first_line)
    assert total[PLAIN][line] == 0b111 and maximum and line not in maximum.get(PLAIN, {})


@pytest.mark.slow
def test_drawn_cases_catch_a_mutant_and_pass_the_original():
    cases = DrawnCases(examples=4)
    caught = cases.judge(mutant_of(RETURNED, "return (total / 2).to(x.dtype)"), {SUM: range(4)})
    assert (caught["drawn"], caught["examples"]) == ("sum_to_invariant", 1) and "value" in caught["oracle"]
    assert cases.judge(mutant_of(RETURNED, "return total.to(dtype=x.dtype)"), {SUM: range(4)})["drawn"] is None
    assert cases.judge(mutant_of(RETURNED, "return ("), {SUM: range(4)})["drawn"] == AT_IMPORT


def test_python_imports_the_tree_of_a_mutant():
    with tree_of(mutant_of(RETURNED, "return 17")) as tree:
        program = "import inspect, torch_impl.collectives.plain as p; print(inspect.getsource(p.all_reduce_sum))"
        environment = {"PYTHONPATH": str(tree)}
        done = warm_python.run("-c", program, folder=tree, environment=environment, imported=warm_python.TORCH)
        assert "return 17" in done.stdout, done.stderr
    assert RETURNED in (ROOT / PLAIN).read_text()


def test_a_process_in_the_folder_above_a_test_has_the_mutant():
    with tree_of(mutant_of(RETURNED, "return 17")) as tree:
        tests = (tree / "parity_tests" / "conftest.py").resolve()
        assert "return 17" in (tests.parents[1] / PLAIN).read_text()


@pytest.mark.slow
def test_the_first_test_that_fails_catches_a_mutant_if_it_passes_without():
    runs, mutant = TestRuns(Workers(1)), mutant_of(RETURNED, "return (total / 2).to(x.dtype)")
    maximum = TestReach({}, 0.1, f"{SUM_FILE}::test_the_maximum_is_exact_and_has_no_gradient[torch.float64]", {})
    total = TestReach({}, 0.2, f"{SUM_FILE}::test_narrow_dtypes_are_summed_in_float32", {})
    assert runs.first_failing(mutant, [total, maximum], CAP_S) == Failure(total.name)
    assert runs.first_failing(mutant, [maximum, total], 0.01) == Failure(None, capped=True)
    runs._healthy[total.name] = False
    assert runs.first_failing(mutant, [maximum, total], CAP_S) == Failure(None)


def test_a_run_goes_on_where_it_was_stopped():
    mutant = mutant_of(RETURNED, "return total")
    journal = Journal(Path("build") / "mutants.jsonl")
    assert without_cases(journal, [mutant]) == [mutant]
    journal.add({"key": mutant.key, "schemes": 1, "examples": 4, "drawn": None, "oracle": None})
    assert not without_cases(journal, [mutant]) and not outcomes(journal, [mutant])[0].is_tested
    journal.add({"key": mutant.key, "spent": 2.0})
    assert without_tests(Journal(journal.path), [mutant]) == [mutant]
    journal.add({"key": mutant.key, "tests": "parity_tests/collectives/test_schemes.py"})
    (outcome,) = outcomes(Journal(journal.path), [mutant])
    assert (outcome.drawn, outcome.is_tested, outcome.tests) == (None, True, "parity_tests/collectives/test_schemes.py")


def test_a_batch_is_of_one_component_and_the_largest_comes_first():
    mutants = [replace(mutant_of(RETURNED, "return total"), file=f"torch_impl/{name}/a.py") for name in "abb"]
    many = mutants + BATCH * mutants[1:2]
    assert [(batch[0].component, len(batch)) for batch in batches(many)] == [("b", BATCH), ("b", 2), ("a", 1)]
    assert [len(batch) for batch in batches(mutants, size=1)] == [1, 1, 1]
    first, *_, last = batches([replace(each, start=start) for start, each in enumerate(reversed(many))])
    assert [mutant.start for mutant in first] == sorted(mutant.start for mutant in first) and last[0].component == "a"


@pytest.mark.slow
def test_threads_may_look_for_lines_at_the_same_time():
    """Python 3.11 parses in one thread at a time, and a collection of garbage lets another one in."""
    mutant = replace(mutant_of(RETURNED, "return total"), file="torch_impl/context_parallel/attention.py")

    def another_thread(phase, info):
        time.sleep(0)

    before = gc.get_threshold()
    gc.set_threshold(50)
    gc.callbacks.append(another_thread)
    try:
        lines = Workers(4).each(lambda _: places.lines_of_users(mutant), range(40))
    finally:
        gc.callbacks.remove(another_thread)
        gc.set_threshold(*before)
    assert len(set(lines)) == 1


def test_reached_lines_are_remembered_while_the_text_is_the_same():
    memory = Memory(Path("lines.jsonl"))
    assert memory.get("a", "text") is None
    memory.put("a", "text", {PLAIN: {"2": 0b100}}, [PLAIN])
    reach = CaseReach(Memory(Path("lines.jsonl")).get("a", "text"))
    assert memory.get("a", "another text") is None
    other = Memory(Path("lines.jsonl"))
    other._production["torch_impl/collectives/lengths.py"] = "changed"
    assert other.get("a", "text") is not None  # which it does not run
    other._production[PLAIN] = "changed"
    assert other.get("a", "text") is None
    assert (reach.cases(PLAIN, [2]), reach.cases(PLAIN, [1])) == ([2], [])


@pytest.mark.slow
def test_a_test_has_the_lines_that_its_ranks_run():
    """Ranks are threads; of the function beside it, which another test of the file runs, it has none."""
    tests = of_tests(Memory(Path("lines.jsonl")), [ROOT / SUM_FILE], Workers(1), print)
    (total,) = [test for test in tests if test.name.endswith("test_narrow_dtypes_are_summed_in_float32")]
    (maximum,) = [test for test in tests if test.name.endswith("no_gradient[torch.float64]")]
    line = mutant_of(RETURNED, "return total").first_line
    assert total.runs(PLAIN, [line])
    assert maximum.lines and not maximum.runs(PLAIN, [line])


def test_a_test_reaches_more_than_its_own_lines():
    """A test also reaches its file's wide fixtures, and all lines of its file where it starts processes."""
    tests = {
        f"{SUM_FILE}::{name}": {"passed": name != "fails", "seconds": 1.0, "starts": name == "starts", "slow": False}
        for name in ("plain", "starts", "fails")
    }
    found = {
        "lines": {
            f"{SUM_FILE}::plain": {PLAIN: [2]},
            f"{SUM_FILE}::fails": {PLAIN: [3]},
            f"wide {SUM_FILE}": {PLAIN: [9]},
            f"collected {SUM_FILE}": {PLAIN: [1]},
        },
        "imported": {SUM_FILE: {PLAIN: [5, 6]}},
        "tests": tests,
    }
    found = _of_file(found, SUM_FILE)
    lines = {test["name"].partition("::")[2]: test["lines"][PLAIN] for test in found["tests"]}
    assert lines == {"plain": [2, 9], "starts": [2, 3, 5, 6, 9]} and found["collected"] == {PLAIN: [1]}


def test_a_default_is_judged_by_runs_of_its_function_whoever_counts_its_line_too():
    """A test that starts processes has the whole text of a function; one that calls it has the body."""
    text = (ROOT / PLAIN).read_text().splitlines()
    header = 1 + next(i for i, line in enumerate(text) if line.startswith("def all_reduce_sum"))
    default = replace(mutant_of(RETURNED, "return total"), first_line=header, last_line=header)
    body = mutant_of(RETURNED, "return total").first_line
    starts, calls = (TestReach({PLAIN: lines}, 0.1, SUM_FILE, {}) for lines in ([header, body], [body]))
    assert reaching(default, [starts, calls]) == [starts, calls]


def test_lines_run_only_by_collecting_are_judged_by_that_files_tests():
    mutant = mutant_of(RETURNED, "return total")
    far, runs_it = (TestReach({PLAIN: [line]}, 0.1, SUM_FILE, {}) for line in (1, mutant.first_line))
    collects_it = replace(far, collected=runs_it.lines)
    assert reaching(mutant, [collects_it, runs_it]) == [runs_it]
    assert reaching(mutant, [collects_it, far]) == [collects_it]


def test_the_page_counts_by_component_and_lists_survivors(monkeypatch):
    mutant = mutant_of(RETURNED, "return total")
    caught, by_tests = Outcome(mutant, 1, 1, "a", "value", None), Outcome(mutant, 1, 4, None, None, "test_a.py")
    survivor = Outcome(mutant, 0, 0, None, None, None)
    outcomes = [caught, by_tests, survivor]
    capped = replace(survivor, capped=True)
    assert page.closing([capped])[-1].startswith("1 of") and page.closing([survivor])[-1].startswith("0 of")
    untested = replace(survivor, is_tested=False)
    assert page.closing([untested])[-2].startswith("1 of the survivors have tests") and page.survivors(
        [untested]
    ) == page.survivors([capped])
    assert page.survivors([capped]).endswith("Not all of its tests have run.")
    assert "| collectives | 3 | 1 of 2 (50.0%) | 2 of 3 (66.7%) | 1 | 0 |" in page.table(outcomes)
    assert page.survivors(outcomes).startswith(f"- `{PLAIN}:{mutant.first_line}`, `all_reduce_sum`, arithmetic: ")
    assert not page.is_promised(outcomes) and "the promise is made of 1000" in page.closing(outcomes)[0]
    monkeypatch.setattr("parity_tests.evidence.mutants.outcomes.why_equivalent", lambda mutant: "no caller sees it")
    assert page.table(outcomes).splitlines()[-1].endswith("| 0 | 1 |")
    assert "Equivalent: no caller sees it" in page.text(outcomes, 0, 16, 10)
    assert json.dumps(mutant.to_dict())


def test_no_reading_is_stale():
    """Each is of a mutant that the rules still make."""
    made = {(mutant.file, mutant.place) for mutant in places.candidates()}
    assert [reading for reading in equivalent() if reading not in made] == []


def test_mutants_that_overlap_are_made_on_different_trees():
    outer, inner = mutant_of(RETURNED, "return 1"), mutant_of("total.to(x.dtype)", "1")
    elsewhere = replace(inner, file="torch_impl/collectives/mesh.py")
    assert equivalents.layers([inner, elsewhere, outer]) == [[elsewhere, outer], [inner]]
    text = (ROOT / PLAIN).read_text()
    both = changed(PLAIN, [mutant_of("total", "whole_sum"), mutant_of(".to(x.dtype)", "")])
    assert len(both) == len(text.encode()) + len("whole_sum") - len("total") - len(".to(x.dtype)")


def test_the_mutants_that_tests_see_are_found_among_many():
    mutants = [replace(mutant_of(RETURNED, "return 1"), start=start) for start in range(9)]
    sees = {"first": {3}, "second": {3, 7}, "none": set(), "flaky": {5}}

    def fails(some, test):
        return test == "flaky" or any(mutant.start in sees[test] for mutant in some)

    wrong, met = equivalents.seen(mutants, list(sees), fails)
    assert {mutant.start: test for mutant, test in wrong.items()} == {3: "first", 7: "second"} and not met


def test_mutants_that_meet_are_not_taken_for_one_that_a_test_sees():
    """One takes the branch that another one changes: the test sees neither alone."""
    mutants = [replace(mutant_of(RETURNED, "return 1"), start=start) for start in range(5)]
    wrong, met = equivalents.seen(mutants, ["both"], lambda some, test: {1, 4} <= {each.start for each in some})
    assert wrong == {} and [mutant.start for mutant in met] in ([1], [4])


@pytest.mark.slow
def test_failing_tests_on_a_tree_of_mutants_are_named():
    test = f"{SUM_FILE}::test_narrow_dtypes_are_summed_in_float32"
    assert equivalents.failing([mutant_of(RETURNED, "return (total / 2).to(x.dtype)")], [test]) == [test]
    assert equivalents.failing([], [test]) == []
    with pytest.raises(RuntimeError, match="pytest ended with"):
        equivalents.failing([], ["parity_tests/no_such_file.py"])


def test_the_sentence_on_equivalents_replaces_the_one_before():
    text = "# Mutants\n"
    for seen in (2, 0):
        text = with_section(text, page.TESTED_AT_ONCE, page.of_equivalents(70, seen))
    assert "Of 70 mutants that are read as equivalent, 0 are seen by a test" in text
    again = page.text([], 0, 16, 10, before=text)
    assert text.count("are seen by a test") == again.count("0 are seen by a test") == again.count("## Read as") == 1
