"""Ragged: goldens, DTensor's rule, production equals the reference, a partition, and the lengths that it rejects."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jax_ref.layouts import ceil_lengths, check_partition
from jax_ref.layouts import ragged as reference
from torch_impl.layouts import TokenLayout, draw, ragged


@pytest.mark.parametrize("layout", [reference, ragged])
def test_golden(layout):
    assert [piece.tolist() for piece in layout(7, 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [piece.tolist() for piece in layout(4, 3)] == [[0, 1], [2, 3], []]
    assert [piece.tolist() for piece in layout(6, 4, (0, 1, 5, 0))] == [[], [0], [1, 2, 3, 4, 5], []]
    assert [piece.tolist() for piece in layout(0, 2)] == [[], []]


def test_picture():
    assert draw(ragged, 7, 2) == "0000111"
    assert draw(lambda size, world: ragged(size, world, [1, 0, 4]), 5, 3) == "02222"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", range(20))
def test_the_rule_matches_torch_chunk(size, world):
    lengths = [len(piece) for piece in torch.arange(size).chunk(world)] if size else []
    assert ceil_lengths(size, world) == lengths + [0] * (world - len(lengths))
    assert [len(piece) for piece in ragged(size, world)] == ceil_lengths(size, world)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_production_is_the_reference_and_a_partition(lengths):
    size, world = sum(lengths), len(lengths)
    for given_lengths in (lengths, None):
        expected = reference(size, world, given_lengths)
        check_partition("ragged", expected, size)
        assert [p.tolist() for p in ragged(size, world, given_lengths)] == [p.tolist() for p in expected]


@pytest.mark.parametrize("layout", [reference, ragged])
@pytest.mark.parametrize(
    ("size", "world", "lengths", "sentence"),
    [
        (16, 4, (5, 5, 6), "ragged: lengths (5, 5, 6) have 3 entries, world=4; give one for each rank"),
        (4, 2, (5, -1), "ragged: lengths (5, -1) have a negative one; lengths are 0 or more"),
        (16, 4, (5, 5, 5, 2), "ragged: lengths (5, 5, 5, 2) add up to 17, size=16; they must be equal"),
        (-1, 2, None, "size=-1 is not a size; sizes are 0 or more"),
        (4, 0, None, "world=0 is not a number of ranks; it is 1 or more"),
    ],
)
def test_rejections(layout, size, world, lengths, sentence):
    with pytest.raises(ValueError) as caught:
        layout(size, world, lengths)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("lengths", [(4.5, 4.5), (4, "4"), (None, 8), (True, 7)])
def test_lengths_that_are_not_integers_are_rejected(lengths):
    with pytest.raises(TypeError) as caught:
        ragged(8, 2, lengths)
    assert str(caught.value) == f"ragged: lengths {lengths} are not all integers; pass ints"


def test_lengths_are_integers_of_any_kind():
    assert [len(piece) for piece in ragged(8, 2, torch.tensor([3, 5]))] == [3, 5]


def test_lengths_are_one_for_each_rank():
    for call in (lambda: ragged(9, 2, 5), lambda: TokenLayout.dense("ragged", 9, cp_size=2, cp_rank=0, counts=5)):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == "ragged: lengths=5 is not a sequence; give one int for each rank"
