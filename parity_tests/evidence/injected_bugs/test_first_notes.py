"""The rule by which a first note is true of an injected bug, and the sample that it is measured on."""

import pytest

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.first_notes import EXAMPLES, FALSE, NOTHING, TRUE, headlines, sample, truth
from parity_tests.evidence.injected_bugs.trials import SchemeTrials
from shardproof.declare import discover


@pytest.mark.parametrize(
    ("kind", "note", "expected"),
    [
        ("reduction", "off by the constant factor 2 (= tp): a reduction is missing or repeated", TRUE),
        ("order", "off by the constant factor 2 (= tp): a reduction is missing or repeated", FALSE),
        ("reduction", "within what bfloat16 accumulation may do", FALSE),
        ("precision", "within what bfloat16 accumulation may do", TRUE),
        ("precision", "wrong only where tp rank 1 owns (2 of its 4 elements)", FALSE),
        ("border", "wrong only where tp rank 1 owns (2 of its 4 elements)", TRUE),
        ("border", "a term sits 1 place off along v: an offset is wrong by 1", TRUE),
        ("scale", "a term sits 1 place off along v: an offset is wrong by 1", FALSE),
        ("scale", "no pattern; worst at (0,1)", NOTHING),
        ("reduction", "forward equal, gradient not", NOTHING),
        ("reduction", "forward equal, gradient not: all_reduce at x.py:7 [bwd] is one too many", TRUE),
        ("order", "forward equal, gradient not: all_reduce at x.py:7 [bwd] is one too many", FALSE),
        ("reduction", "right once all_reduce at x.py:7 takes AVG, not SUM", TRUE),
        ("order", "right once all_reduce at x.py:7 takes AVG, not SUM", FALSE),
        ("precision", "each rank computes the reference of its own shard", FALSE),
    ],
)
def test_a_note_is_true_of_the_kinds_that_it_can_mean(kind, note, expected):
    assert truth(kind, note) == expected


def test_a_sample_is_drawn_across_components_and_repeats():
    drawn = sample(CATALOGUE, 60)
    assert len({bug.name for bug in drawn}) == 60 and drawn == sample(CATALOGUE, 60)
    components = {bug.component for bug in CATALOGUE if bug.expect.startswith("value") and not bug.survives}
    assert {bug.component for bug in drawn} >= components


@pytest.mark.slow
def test_the_notes_of_a_sum_that_was_averaged():
    (bug,) = (bug for bug in CATALOGUE if bug.name == "sum averaged" and bug.component == "collectives")
    near = [SchemeTrials(scheme, EXAMPLES) for scheme in discover.built_in() if ".collectives." in scheme.key]
    said = headlines(bug, near)
    assert said is not None and not said.is_undecided
    assert [truth(bug.kind, note) for note in (said.alone, said.tested)] == [TRUE, TRUE]
