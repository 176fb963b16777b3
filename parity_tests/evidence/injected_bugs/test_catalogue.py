"""The catalogue is not stale, and the drawn examples catch its bugs."""

import ast
import builtins
from collections import Counter

import pytest

from parity_tests.evidence.injected_bugs import report
from parity_tests.evidence.injected_bugs.catalogue import APPLICABLE, CATALOGUE
from parity_tests.evidence.injected_bugs.injected_bug import ROOT, InjectedBug, patched_text
from parity_tests.evidence.injected_bugs.runner import EXAMPLES, BugRunner, Catch, Outcome, lines_that_name, run_bugs
from parity_tests.evidence.injected_bugs.trials import SchemeTrials, fixed_cases
from parity_tests.vocab_parallel.test_sampling_filter import filtered_by_lists
from shardproof.declare.discover import built_in

COUNTED = [bug for bug in CATALOGUE if not bug.equivalent]
PROMISED = 0.95
SAMPLED, SAMPLED_FAST = 100, 12  # every n-th bug of a group


def needs_more_than_values(bug):
    """Whether values alone cannot confirm the report: it has words, or another oracle gives it."""
    oracle, _, words = bug.expect.partition(":")
    return bool(words.strip()) or oracle in ("protocol", "cost", "hygiene")


def groups():
    """Bugs by their component, and by whether values alone confirm their reports."""
    found = {}
    for bug in CATALOGUE:
        found.setdefault((bug.component, needs_more_than_values(bug)), []).append(bug)
    return found


GROUPS = groups()


def undefined_names(text):
    """Names that a file reads and binds nowhere: a bug with one raises in any case, whatever it is about."""
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


@pytest.mark.fast_values(78)
@pytest.mark.parametrize("bug", CATALOGUE, ids=lambda bug: bug.name)
def test_a_bug_is_not_stale_and_can_be_compiled(bug):
    assert bug.new != bug.old
    patched = patched_text(bug)
    assert undefined_names(patched.text) == undefined_names((ROOT / patched.file).read_text())


def test_an_undefined_name_is_seen():
    assert undefined_names("import a.b\ndef f(x, *, y=1):\n    z = max(x, y)\n    return a.b(z, w)") == {"w"}


def test_names_of_bugs_are_unique():
    assert [name for name, count in Counter(bug.name for bug in CATALOGUE).items() if count > 1] == []


def test_there_are_a_hundred_bugs_and_three_of_each_kind():
    kinds = Counter(bug.kind for bug in COUNTED)
    assert len(COUNTED) >= 100
    assert [kind for kind in APPLICABLE if kinds[kind] < 3] == []


def test_published_mistakes_are_in_the_catalogue():
    libraries = {"NVIDIA/Megatron-LM #7452", "NVIDIA/TransformerEngine #1929", "NVIDIA/TransformerEngine #3331"}
    assert {"TrainVerify", *libraries} <= {bug.source for bug in CATALOGUE}


def test_an_expectation_names_an_oracle():
    failed = {"raised", "collective mismatch", "deadlock", "unwaited", "modified"}
    oracles = {"value", "gradient", "protocol", "cost", "hygiene", *failed}
    assert {bug.expect.partition(":")[0] for bug in CATALOGUE} <= oracles


def outcome(expect, catches=(), **more):
    bug = InjectedBug("injected", "scale", "nowhere:symbol", "2", "3", expect, **more)
    return Outcome(bug, 1, 1, catches, False, False, 0.0)


def test_closing_lines_compare_the_catalogue_with_the_outcome():
    seen = (Catch("halved", 2, ("gradient",), "forward equal, gradient not"),)
    rare = {"survives": "rare"}
    wrong = "reported otherwise than expected: injected", "caught although expected to survive: injected"
    assert wrong[0] in report.closing([outcome("value: ", seen)], EXAMPLES)
    assert wrong[1] in report.closing([outcome("value: ", seen, **rare)], EXAMPLES)
    for right in (outcome("gradient: forward equal", seen), outcome("value: ", **rare)):
        assert not set(wrong) & set(report.closing([right], EXAMPLES))


def test_a_constant_affects_the_schemes_that_run_a_line_with_its_name():
    bug = next(bug for bug in CATALOGUE if bug.at == "vocab_parallel:LONGEST_LIST")
    file = patched_text(bug).file
    naming = lines_that_name(bug, file)[-1]
    runner = BugRunner(examples=1, schemes=[filtered_by_lists])
    by_line = {}
    for line in (naming, naming + 1):
        by_line[line] = SchemeTrials(filtered_by_lists, examples=1)
        by_line[line].lines = frozenset({(file, line)})
    runner.schemes = list(by_line.values())
    assert runner.affected(bug) == [by_line[naming]]
    runner.schemes = [by_line[naming + 1]]
    assert runner.affected(bug) == runner.schemes, "where none does, those that run any line of the file"


def test_cases_of_one_shape_have_a_dtype_that_their_scheme_declares():
    without_float32 = [scheme for scheme in built_in() if "float32" not in scheme.dtypes]
    assert without_float32
    for scheme in without_float32:
        assert {case.dtype for case in fixed_cases(scheme)} <= set(scheme.dtypes)


def caught(bugs, runner):
    """Inject bugs as `make bugs` does, which also counts the catches of a test of one shape, and writes the page."""
    outcomes = run_bugs(bugs, runner)
    text = "\n".join(report.closing(outcomes, EXAMPLES))
    observable = report.counted(outcomes)
    expected = [outcome for outcome in outcomes if not outcome.bug.survives]  # its reason may be that no scheme runs it
    assert [outcome.bug.name for outcome in expected if not outcome.affected] == [], "in code that no scheme runs"
    assert [outcome.bug.name for outcome in observable if not (outcome.caught or outcome.bug.survives)] == [], text
    assert [outcome.bug.name for outcome in outcomes if outcome.bug.equivalent and outcome.caught] == [], text
    assert [outcome.bug.name for outcome in observable if outcome.bug.survives and outcome.caught] == [], text
    return outcomes


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("component", ["collectives", "mamba", "optimizers"])
def test_schemes_of_a_component_catch_a_sample_of_its_bugs(component):
    """For a component whose schemes run few lines of other components."""
    schemes = [scheme for scheme in built_in() if scheme.key.startswith(f"parity_tests.{component}.")]
    sample = [bug for (of, _), bugs in GROUPS.items() if of == component for bug in bugs[::SAMPLED_FAST]]
    assert {needs_more_than_values(bug) for bug in sample} == {False, True}
    caught(sample, BugRunner(schemes=schemes, with_baseline=False, traced=1, until_caught=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_drawn_examples_catch_a_sample_of_the_bugs():
    sample = [bug for bugs in GROUPS.values() for bug in bugs[::SAMPLED]]
    outcomes = caught(sample, BugRunner(with_baseline=False, traced=1, until_caught=True))
    observable = report.counted(outcomes)
    assert sum(outcome.caught for outcome in observable) >= PROMISED * len(observable)


@pytest.fixture(scope="module")
def thorough_runner():
    """Knows lines of as many drawn cases as `make bugs`."""
    return BugRunner(with_baseline=False, until_caught=True)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(("component", "more_than_values"), sorted(GROUPS))
def test_drawn_examples_catch_the_bugs_of_a_component(component, more_than_values, thorough_runner):
    caught(GROUPS[component, more_than_values], thorough_runner)


def test_the_page_has_a_summary_and_the_table_every_bug(tmp_path):
    seen = (Catch("halved", 2, ("gradient",), "forward equal, gradient not"),)
    outcomes = [
        outcome("gradient: forward equal", seen, source="elsewhere"),
        outcome("value: "),
        outcome("value: ", equivalent="it is"),
    ]
    report.write_page(outcomes, EXAMPLES, tmp_path)
    page = (tmp_path / "injected-bugs.md").read_text()
    assert "| nowhere | 2 | 1 | 1 | 0 | 2 | 2 |" in page and "| injected" not in page
    assert "- survived: injected: NOT EXPLAINED" in page and "- equivalent: injected: it is" in page
    for name in ("injected_bugs.svg", "injected_bugs-dark.svg"):
        assert (tmp_path / "images" / name).exists() and f"{{image}} images/{name}\n" in page
    table = report.one_by_one(outcomes)
    assert "| injected (elsewhere) | scale | gradient | halved | 2 | 2 | right | - | - |" in table
    assert "| injected | scale | SURVIVED | - |" in table and "| injected | scale | equivalent | - |" in table
