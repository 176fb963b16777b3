"""Notes on a gradient that came back as None."""

import numpy as np

from parity_tests.specimens.evidence_by_hand import columns_of, evidence, numbers
from shardproof.explain.clues import explain


def notes(got, want, absent, **fields):
    return explain(evidence(got, want, role="gradient", gradient_is_none=np.broadcast_to(absent, want.shape), **fields))


def test_none_where_the_gradient_is_zero_is_no_mistake():
    assert notes(np.zeros(4), np.zeros(4), True) == ()


def test_none_everywhere():
    want = numbers(4)
    want[1] = 0.0
    assert notes(0 * want, want, True) == ("no gradient was returned (None): backward does not reach this input",)


def test_none_by_some_ranks():
    want, owners = numbers(2, 8), columns_of((2, 8), 4)
    missing = owners >= 2
    clues = notes(np.where(missing, 0.0, want), want, missing, owners={"tp": owners})
    assert clues[0] == "no gradient was returned (None) by tp ranks 2, 3: backward does not reach this input there"


def test_none_by_one_rank_and_zeros_by_the_other():
    want, owners = numbers(2, 8), columns_of((2, 8), 2)
    clues = notes(0 * want, want, owners == 1, owners={"tp": owners})
    assert clues == (
        "no gradient was returned (None) by tp rank 1: backward does not reach this input there",
        "gradient is zero: backward does not reach this input",
    )
