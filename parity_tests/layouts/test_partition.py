"""check_partition rejects a custom layout unless it has every position exactly once."""

import numpy as np
import pytest

from jax_ref.layouts import check_partition


def rejection(pieces, size):
    with pytest.raises(ValueError) as caught:
        check_partition("mine", [np.array(piece) for piece in pieces], size)
    return str(caught.value)


def test_any_order_and_any_lengths_are_a_partition():
    check_partition("mine", [np.array([3, 0]), np.array([], np.int64), np.array([1, 2, 4])], 5)
    check_partition("mine", [np.array([])], 0)


def test_mistakes_are_listed():
    start = "layout 'mine' is not a partition of 8 positions over 2 ranks: "
    assert rejection([[0, 1, 1, 3], [4, 5, 6, 7]], 8) == start + "missing [2], repeated [1]"
    assert rejection([[0, 1, 2, 3], [4, 5, 6]], 8) == start + "missing [7]"
    assert rejection([[0, 1, 2, 3], [4, 5, 6, 7, 7]], 8) == start + "repeated [7]"
    assert rejection([[0, 1, 2, 3, -1], [4, 5, 6, 7, 9]], 8) == start + "outside [-1, 9]"


def test_long_lists_are_abbreviated():
    assert rejection([[0]], 20).endswith("over 1 rank: missing [1, 2, 3, 4, 5, 6, 7, 8] and 11 more")


def test_shards_are_rows_of_integers():
    assert rejection([[[0, 1]]], 2) == "layout 'mine' gives rank 0 an array of shape (1, 2); positions are one row"
    assert rejection([[0], [1.0]], 2) == "layout 'mine' gives rank 1 dtype float64; positions are integers"
