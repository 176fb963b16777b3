"""Offsets: one term per row, a fixed number of places from where it belongs."""

import numpy as np

from parity_tests.specimens.evidence_by_hand import headline, numbers

COLUMNS = 8


def one_term_each(rows, at, shift):
    """Two tensors that differ by where a term of 1 was added in each row; off the edge it is lost."""
    base = numbers(rows, COLUMNS)
    want, got = base.copy(), base.copy()
    for row, column in enumerate(at):
        want[row, column] += 1.0
        if column + shift < COLUMNS:
            got[row, column + shift] += 1.0
    return got, want


def test_a_term_beside_its_place():
    got, want = one_term_each(4, [0, 3, 5, 7], 1)
    assert headline(got, want, dims=("b", "v")) == "a term sits 1 place off along v: an offset is wrong by 1"
    got, want = one_term_each(3, [0, 3, 5], 2)
    assert headline(got, want) == "a term sits 2 places off along dim 1: an offset is wrong by 2"


def test_one_row_or_two_distances_tell_nothing():
    got, want = one_term_each(1, [2], 3)
    assert "sits" not in headline(got, want)
    got, want = one_term_each(2, [1, 2], 1)
    got[1] = want[1]
    got[1, 2], got[1, 5] = want[1, 2] - 1.0, want[1, 5] + 1.0
    assert "sits" not in headline(got, want)


def test_errors_that_do_not_cancel_are_no_displacement():
    got, want = one_term_each(3, [0, 3, 5], 1)
    got[np.arange(3), [1, 4, 6]] += 0.5
    assert "sits" not in headline(got, want)
