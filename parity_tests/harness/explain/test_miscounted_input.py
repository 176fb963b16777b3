"""An input that is added on every rank, or on none."""

import numpy as np

from parity_tests.specimens.evidence_by_hand import evidence, headline, numbers
from shardproof.explain.clues import explain

BIAS = np.broadcast_to(numbers(5, seed=3), (4, 5))


def test_an_input_added_by_each_rank():
    want = numbers(4, 5)
    assert headline(want + 3 * BIAS, want, inputs={"bias": BIAS}) == (
        "bias is counted 4 times (= tp): each rank adds it before the sum"
    )
    assert headline(want + BIAS, want, inputs={"bias": BIAS}, axes={"tp": 4}) == "bias is added once too often"


def test_an_input_that_no_rank_adds():
    want = numbers(4, 5)
    assert headline(want - BIAS, want, inputs={"bias": BIAS}) == "bias is left out"


def test_no_claim_without_a_fit():
    want = numbers(4, 5)
    assert headline(want + 2.5 * BIAS, want, inputs={"bias": BIAS}).startswith("no pattern")
    assert headline(want + numbers(4, 5, seed=9), want, inputs={"bias": 0 * BIAS}).startswith("no pattern")


def test_it_is_the_only_note_on_a_bias():
    """A bias also has a constant error at each index of its dim, but that note would say less."""
    want = numbers(4, 5)
    notes = explain(evidence(want + 3 * BIAS, want, inputs={"bias": BIAS}, dims=("b", "n")))
    assert list(notes) == ["bias is counted 4 times (= tp): each rank adds it before the sum"]


def test_no_sum_counts_an_input_where_nothing_is_summed():
    """Without a sum over tp in the ledger, an input cannot be counted once for each of its ranks."""
    want = numbers(4, 5)
    got = want + 3 * BIAS
    assert headline(got, want, inputs={"bias": BIAS}, summed_axes=frozenset({"tp"})).startswith("bias is counted 4")
    assert headline(got, want, inputs={"bias": BIAS}, summed_axes=frozenset()).startswith("no pattern")


def test_a_factor_says_more_than_an_input_in_proportion():
    want = 2 * numbers(4, 5)
    assert headline(3 * want / 2, want, inputs={"x": want / 2}) == (
        "off by the constant factor 1.5: a scale is missing or wrong"
    )
