"""Two tiers of tests: which bugs are judged, by which tests, and which counts the page has."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.injected_bug import patched_text
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants import tiers
from parity_tests.evidence.mutants.by_tests import Failure, TestRuns
from parity_tests.evidence.mutants.mutant import changed
from parity_tests.evidence.mutants.reached import Memory, TestReach
from parity_tests.evidence.mutants.tiers import INJECTED, MUTANTS, Verdict, of_bug
from parity_tests.evidence.workers import Workers

BUG = of_bug(CATALOGUE[0])
REACHED = {BUG.file: list(range(BUG.first_line, BUG.last_line + 1))}
FAST, SLOW = (TestReach(REACHED, 0.1, f"test_a.py::test_{slow}", {}, slow) for slow in (False, True))


@pytest.mark.parametrize("bug", CATALOGUE[::40], ids=lambda bug: bug.name)
def test_an_injected_bug_is_a_change_of_its_file(bug):
    mutant = of_bug(bug)
    assert changed(mutant.file, [mutant]).decode() == patched_text(bug).text


@pytest.fixture
def judged(monkeypatch):
    """(a function: tests that catch the bug -> its verdict, the list of test runs as (profile, *tests))."""
    runs = []

    def record(*catching, capped=False):
        def first_failing(self, mutant, tests, cap):
            runs.append((*self.options, *(test.name for test in tests)))
            return Failure(next((test.name for test in tests if test in catching), None), capped)

        monkeypatch.setattr(TestRuns, "first_failing", first_failing)
        monkeypatch.setattr(tiers, "of_tests", lambda *_: [FAST, SLOW])
        journal = Journal(Path("tiers.jsonl"))
        tiers.judge([BUG], Memory(Path("lines.jsonl")), journal, Workers(1), 1.0, print)
        return tiers.verdict(INJECTED, BUG, journal.of(BUG.key))

    return record, runs


def test_all_tests_are_run_where_the_fast_ones_miss_a_bug(judged):
    record, runs = judged
    assert record(SLOW) == Verdict(BUG, INJECTED, None, SLOW.name, False)
    assert runs == [("--hypothesis-profile=fast", FAST.name), ("--hypothesis-profile=ci", FAST.name, SLOW.name)]


def test_a_bug_that_a_fast_test_catches_is_judged_once(judged):
    record, runs = judged
    assert record(FAST) == record(SLOW) == Verdict(BUG, INJECTED, FAST.name, FAST.name, False)
    assert len(runs) == 1


def test_a_bug_without_time_for_tests_is_not_judged(judged):
    record, _ = judged
    assert record(capped=True).is_open


def test_the_tests_of_a_component_are_traced_when_the_first_of_its_bugs_is_judged(monkeypatch):
    other = next(of_bug(bug) for bug in CATALOGUE if of_bug(bug).component != BUG.component)
    again = replace(BUG, new=f"{BUG.new} ")
    events = []
    monkeypatch.setattr(tiers, "of_tests", lambda memory, files, *_: events.append(files[0].parent.name) or [FAST])
    judged = Failure(FAST.name)
    monkeypatch.setattr(TestRuns, "first_failing", lambda self, mutant, *_: events.append(mutant) or judged)
    memory, journal = Memory(Path("lines.jsonl")), Journal(Path("tiers.jsonl"))
    tiers.judge([BUG, other, again], memory, journal, Workers(1), 1.0, print)
    assert events == [BUG.component, BUG, other.component, other, again]


def test_an_interrupted_run_has_judged_bugs_of_many_components_and_writes_the_page(monkeypatch):
    sample, judged = [(INJECTED, of_bug(bug)) for bug in CATALOGUE[::20]], []
    monkeypatch.setattr(tiers, "bugs", lambda count, seed: sample)

    def judge(mutants, memory, journal, *_):
        for mutant in mutants[:20]:
            judged.append(mutant)
            journal.add({"key": mutant.key, "fast": "a", "fast_capped": False})
        raise KeyboardInterrupt

    monkeypatch.setattr(tiers, "judge", judge)
    app = tiers.typer.Typer()
    app.command()(tiers.main)
    assert CliRunner().invoke(app, ["--page", "tiers.md"]).exit_code == 0
    words = f"20 of 20 (100.0%) of those that all tests catch; 20 of {len(sample)} are judged"
    assert words in Path("tiers.md").read_text()
    assert len({mutant.component for mutant in judged}) > len({mutant.component for _, mutant in sample[:20]})


def test_the_page_counts_judged_bugs():
    caught, missed, survives, unknown = (
        Verdict(BUG, INJECTED, "a", "a", False),
        Verdict(BUG, INJECTED, None, "b", False),
        Verdict(BUG, MUTANTS, None, None, False),
        Verdict(BUG, MUTANTS, None, None, True),
    )
    verdicts = [caught] * 97 + [missed] * 3 + [survives, unknown]
    text = tiers.page(verdicts, 2, 0)
    assert "- Mutants: the fast tests catch 0 of 0 of those that all tests catch; 1 of 2 are judged so far.\n" in text
    assert "- Injected bugs: the fast tests catch 97 of 100 (97.0%) of those that all tests catch, of 100.\n" in text
    assert "| all | 0 of 0 | 97 of 100 (97.0%) | 1 | 1 |" in text
    assert text.count(f"- `{BUG.file}:{BUG.first_line}`") == 3 and text.count("by `b`.") == 3
    assert tiers.is_promised(verdicts) and not tiers.is_promised([*verdicts, missed])
