"""The wrong beliefs are ideas, not operators; they apply, and a default run catches or misses each."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from parity_tests.collectives.test_schemes import gather_to_replicated, uneven_gather_to_invariant
from parity_tests.evidence.beliefs import judge, page
from parity_tests.evidence.beliefs.belief import BELIEFS, KINDS, Belief
from parity_tests.evidence.injected_bugs.injected_bug import ROOT, patched_text, stale_bugs
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants.tiers import of_bug
from shardproof.places import component_folders

BY_NAME = {belief.name: belief for belief in BELIEFS}
OF_SHARDS = BY_NAME["my shard begins at my rank times my length"]
OPERATORS = (ast.operator, ast.cmpop, ast.boolop, ast.unaryop)


class WithoutOperators(ast.NodeTransformer):
    """Each operator becomes one of its kind, and each number 0, so that a swap of two changes nothing."""

    def generic_visit(self, node):
        node = super().generic_visit(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, OPERATORS):
                setattr(node, name, ast.Add())
            elif isinstance(value, list) and value and isinstance(value[0], ast.cmpop):
                setattr(node, name, [ast.Eq()] * len(value))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            node.value = 0
        return node


def without_operators(text):
    return ast.dump(WithoutOperators().visit(ast.parse(text)))


def is_operator_swap(belief):
    patched = patched_text(belief)
    return without_operators(patched.text) == without_operators((ROOT / patched.file).read_text())


@pytest.mark.fast_values(30)
@pytest.mark.parametrize("belief", BELIEFS, ids=lambda belief: belief.name)
def test_a_belief_applies_and_swaps_no_operator(belief):
    assert not is_operator_swap(belief)


def test_no_belief_is_stale():
    assert stale_bugs(BELIEFS) == []


def test_no_two_beliefs_change_a_file_alike():
    names = defaultdict(list)
    for belief in BELIEFS:
        patched = patched_text(belief)
        names[patched.file, patched.text].append(belief.name)
    assert [alike for alike in names.values() if len(alike) > 1] == []


def test_a_swapped_operator_is_seen():
    swapped = Belief("minus", "count", "pipelining:layer_counts", "cost + 1, stage", "cost - 2, stage", "always")
    assert is_operator_swap(swapped)


def test_there_are_150_beliefs_of_every_component_and_kind():
    assert len(BELIEFS) >= 150
    assert [name for name, count in Counter(belief.name for belief in BELIEFS).items() if count > 1] == []
    assert [kind for kind in KINDS if sum(belief.kind == kind for belief in BELIEFS) < 5] == []
    components = {folder.name for folder in component_folders()} - {"contract", "kernels"}
    assert components <= {belief.component for belief in BELIEFS}


def test_a_default_run_catches_a_belief_where_it_shows():
    caught = judge._first_catch(OF_SHARDS, [gather_to_replicated, uneven_gather_to_invariant])
    assert caught == {"drawn": "uneven_gather_to_invariant", "oracle": "raised"}


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    asked = []

    class Judge:
        def record(self, belief):
            asked.append(belief.name)
            return {"drawn": None, "oracle": None, "schemes": 1, "seconds": 0.0}

        def show(self, line):
            pass

    for _ in range(2):
        judge.by_drawn_cases(BELIEFS[:2], Journal(tmp_path / "beliefs.jsonl"), Judge())
    assert asked == [belief.name for belief in BELIEFS[:2]]


def journal_of(**records):
    journal = Journal(None)
    for belief, record in zip(BELIEFS, records.values(), strict=False):
        journal.add({"key": of_bug(belief).key, **record})
    return journal


def test_the_page_has_the_shares_and_each_survivor():
    drawn = {"drawn": "a_scheme", "oracle": "raised"}
    missed = {"drawn": None, "oracle": None}
    records = {"a": drawn, "b": {**missed, "tests": "test_x"}, "c": {**missed, "tests": None}, "d": missed}
    verdicts = page.verdicts(journal_of(**records), BELIEFS[:5])
    assert [verdict.is_tried for verdict in verdicts] == [True, True, True, True, False]
    assert [verdict.is_open for verdict in verdicts] == [False, False, False, True, True]
    assert page.closing(verdicts)[0].startswith("1 of 4 (25.0%) are caught by drawn cases")
    assert page.closing(verdicts)[1].startswith("at least 2 of 4 (50.0%) are caught by drawn cases or fast tests")
    assert page.closing(verdicts[:3])[1].startswith("2 of 3 (66.7%) are caught by drawn cases or fast tests")
    assert page.closing(verdicts)[-1] == "Not run yet: drawn cases on 1, fast tests on 1 of those missed."
    text = page.text(verdicts)
    assert f"`{BELIEFS[2].at}`: {BELIEFS[2].name}" in text.partition("## Caught by nothing")[2].partition("\n## ")[0]
    assert "by `test_x`" in text.partition("## Caught by the tests alone")[2]
    assert not page.is_promised(verdicts)
    assert page.is_promised(page.verdicts(journal_of(a=drawn, b=drawn), BELIEFS[:2]))


def test_the_page_that_is_committed_counts_the_catalogue():
    text = (Path(ROOT) / "docs" / "beliefs.md").read_text()
    assert f"These are {len([belief for belief in BELIEFS if not belief.equivalent])} ideas" in text
