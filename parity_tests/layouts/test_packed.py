"""The packed layout: expected shards, parity with the reference, equal causal work, and rejected offsets."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jax_ref.layouts import check_partition, dual_chunk_swap
from jax_ref.layouts import packed as reference
from torch_impl.layouts import draw, inverse, packed
from torch_impl.layouts.index_arrays import packed_positions as positions

chunk_lengths = st.lists(st.integers(0, 4), max_size=6)
worlds = st.sampled_from([1, 2, 3, 4, 8])


@pytest.mark.parametrize("layout", [reference, packed])
def test_golden(layout):
    assert [p.tolist() for p in layout(12, 2, [0, 4, 12])] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert [p.tolist() for p in layout(8, 2, [0, 0, 4, 4, 8, 8])] == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert [p.tolist() for p in layout(6, 1, [0, 2, 6])] == [[0, 1, 2, 3, 4, 5]]
    assert [p.tolist() for p in layout(0, 3, [0])] == [[], [], []]


def test_picture_and_inverse():
    assert draw(lambda size, world: packed(size, world, [0, 4, 12]), 12, 2) == "011000111100"
    assert inverse(packed(12, 2, [0, 4, 12])).tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]


@given(chunk_lengths, worlds)
def test_production_is_the_reference_and_a_partition(chunks, world):
    offsets = list(accumulate((2 * world * chunk for chunk in chunks), initial=0))
    size = offsets[-1]
    expected = reference(size, world, offsets)
    check_partition("packed", expected, size)
    for given_offsets in (offsets, torch.tensor(offsets, dtype=torch.int32)):
        assert [p.tolist() for p in packed(size, world, given_offsets)] == [p.tolist() for p in expected]
        each = [positions(size, world, rank, given_offsets) for rank in range(world)]
        assert [p.tolist() for p in each] == [p.tolist() for p in expected]


@given(chunk_lengths, worlds)
def test_every_rank_has_the_same_number_of_causal_pairs(chunks, world):
    lengths = [2 * world * chunk for chunk in chunks]
    offsets = torch.tensor(list(accumulate(lengths, initial=0)))
    size = int(offsets[-1])
    first = offsets[:-1].repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    pairs = torch.arange(size) - first + 1
    per_rank = {int(pairs[piece].sum()) for piece in packed(size, world, offsets)}
    assert per_rank == {sum(length * (length + 1) // 2 for length in lengths) // world}


def test_one_sequence_is_dual_chunk_swap():
    assert [p.tolist() for p in packed(24, 3, [0, 24])] == [p.tolist() for p in dual_chunk_swap(24, 3)]


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world(rank):
    with pytest.raises(ValueError) as caught:
        positions(8, 2, rank, [0, 8])
    assert str(caught.value) == f"packed: rank={rank} is not in a world of 2; ranks are 0 to 1"


REJECTED = [
    (12, 2, [1, 12], ValueError, "cu_seqlens: starts at 1; offsets start at 0"),
    (8, 2, [0, 8, 4, 8], ValueError, "cu_seqlens: sequence 1 runs from 8 back to 4; offsets never decrease"),
    (
        16,
        2,
        [0, 4, 13],
        ValueError,
        "cu_seqlens ends at 13 but the stream holds 16 tokens; pass the padded offsets",
    ),
    (
        8,
        2,
        [0, 4, 12],
        ValueError,
        "cu_seqlens ends at 12 but the stream holds 8 tokens; pass the padded offsets",
    ),
    (
        18,
        2,
        [0, 4, 8, 12, 18],
        ValueError,
        "cu_seqlens: sequence 3 has padded length 6, dual_chunk_swap over world=2 needs a multiple of 4; pad it to 8",
    ),
    (4, 1, [[0, 4]], ValueError, "cu_seqlens: shape is (1, 2); offsets are one row that starts at 0"),
    (0, 1, [], ValueError, "cu_seqlens: shape is (0,); offsets are one row that starts at 0"),
    (-2, 1, [0], ValueError, "size=-2 is not a size; sizes are 0 or more"),
    (0, 0, [0], ValueError, "world=0 is not a number of ranks; it is 1 or more"),
]


@pytest.mark.parametrize("layout", [reference, packed])
@pytest.mark.parametrize(("size", "world", "offsets", "kind", "sentence"), REJECTED)
def test_rejections(layout, size, world, offsets, kind, sentence):
    with pytest.raises(kind) as caught:
        layout(size, world, torch.tensor(offsets) if layout is packed else np.array(offsets, int))
    assert str(caught.value) == sentence


def test_offsets_are_integers():
    with pytest.raises(TypeError) as caught:
        reference(4, 1, np.array([0.0, 4.0]))
    assert str(caught.value) == "cu_seqlens: dtype is float64; offsets are integers"
    with pytest.raises(TypeError) as caught:
        packed(4, 1, torch.tensor([0.0, 4.0]))
    assert str(caught.value) == "packed: cu_seqlens: dtype is float32; offsets are integers"
    with pytest.raises(TypeError) as caught:
        packed(1, 1, torch.tensor([False, True]))
    assert str(caught.value) == "packed: cu_seqlens: dtype is bool; offsets are integers"
    with pytest.raises(TypeError) as caught:
        packed(4, 1, ["a"])
    assert str(caught.value) == "packed: cu_seqlens=['a'] are not offsets; pass a row of integers"


@pytest.mark.parametrize(
    ("size", "world", "message"), [(8.0, 2, "size=8.0 is a float"), (8, "2", "world='2' is a str")]
)
def test_sizes_are_integers(size, world, message):
    with pytest.raises(TypeError) as caught:
        packed(size, world, [0, 8])
    assert str(caught.value) == f"packed: {message}; pass an int"
