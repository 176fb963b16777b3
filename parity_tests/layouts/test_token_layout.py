"""The layout of one batch: goldens typed by hand, both statements alike, and what it refuses."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jax_ref.layouts import BUILTIN as REFERENCES
from jax_ref.layouts import ceil_lengths, check_partition
from jax_ref.layouts import token_layout as reference
from torch_impl.layouts import TokenLayout

worlds = st.sampled_from([1, 2, 3, 4, 8])


def held(layout):
    return [[g for g in row if g >= 0] for row in layout.index.tolist()]


def test_golden_dense():
    dense = TokenLayout.dense
    assert held(dense("dual_chunk_swap", 8, cp_size=2, cp_rank=0)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    twelve = dense("dual_chunk_swap", 12, cp_size=3, cp_rank=0)
    assert held(twelve) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert held(dense("striped", 6, cp_size=3, cp_rank=0)) == [[0, 3], [1, 4], [2, 5]]
    assert held(dense("contiguous", 6, cp_size=3, cp_rank=0)) == [[0, 1], [2, 3], [4, 5]]
    ragged = dense("ragged", 7, cp_size=3, cp_rank=2)
    assert ragged.index.tolist() == [[0, 1, 2], [3, 4, 5], [6, -1, -1]]
    assert ragged.local_index.tolist() == [6]
    assert held(dense("ragged", 4, cp_size=3, cp_rank=0)) == [[0, 1], [2, 3], []]
    assert held(dense("ragged", 4, cp_size=2, cp_rank=0, counts=[1, 3])) == [[0], [1, 2, 3]]


def test_golden_packed():
    layout = TokenLayout.packed([0, 4, 12], [0, 3, 10], cp_size=2, cp_rank=1)
    assert layout.index.tolist() == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert layout.local_index.tolist() == [1, 2, 6, 7, 8, 9]
    assert layout.inverse.tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]
    assert layout.sequence_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert layout.padding_mask.nonzero().flatten().tolist() == [3, 11]
    assert layout.local_cu.tolist() == [0, 2, 6]
    assert layout.original_length == 11
    assert layout.cu_padded.dtype == layout.cu_real.dtype == layout.local_cu.dtype == torch.int32


@pytest.mark.parametrize(
    ("layout", "picture"),
    [
        (TokenLayout.dense("contiguous", 8, cp_size=2, cp_rank=0), "00001111"),
        (TokenLayout.dense("ragged", 7, cp_size=2, cp_rank=0), "0000111"),
        (TokenLayout.dense("dual_chunk_swap", 8, cp_size=2, cp_rank=0), "00111100"),
        (TokenLayout.dense("striped", 8, cp_size=2, cp_rank=0), "01010101"),
        (TokenLayout.packed([0, 4, 12], cp_size=2, cp_rank=0), "0110|00111100"),
        (TokenLayout.packed([0, 0, 4, 4], cp_size=2, cp_rank=0), "|0110|"),
        (TokenLayout.packed([0, 3, 8], cp_size=2, cp_rank=0, kind="striped"), "010|10101"),
        (TokenLayout.packed([0], cp_size=2, cp_rank=0), ""),
        (TokenLayout.packed([0, 1, 4], cp_size=1, cp_rank=0), "0|000"),
        (TokenLayout.dense("striped", 38, cp_size=38, cp_rank=0), "0123456789abcdefghijklmnopqrstuvwxyz??"),
    ],
)
def test_picture(layout, picture):
    assert layout.draw() == picture


@given(st.sampled_from(["contiguous", "dual_chunk_swap", "ragged", "striped"]), worlds, st.integers(0, 5))
def test_dense_is_the_reference_and_a_partition(kind, n, chunks):
    length = chunks if kind == "ragged" else 2 * n * chunks
    expected = REFERENCES[kind](length, n)
    check_partition(kind, expected, length)
    for rank in range(n):
        layout = TokenLayout.dense(kind, length, cp_size=n, cp_rank=rank)
        assert held(layout) == [piece.tolist() for piece in expected]
        assert layout.local_index.tolist() == expected[rank].tolist()
        assert layout.local_cu.tolist() == [0, len(expected[rank])]
        assert layout.position_ids.tolist() == list(range(length))
    assert np.concatenate(expected)[layout.inverse.numpy()].tolist() == list(range(length))
    assert layout.counts == tuple(map(len, expected))
    if kind == "ragged":
        assert list(layout.counts) == ceil_lengths(length, n)


lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), max_size=6)  # chunks, and how many are padding


@given(lengths, worlds, st.sampled_from(["packed", "contiguous", "striped"]))
def test_packed_is_the_reference_and_a_partition(chunks, n, kind):
    slots = [2 * n * chunk for chunk, _ in chunks]
    cu, real = [0, *accumulate(slots)], [0, *accumulate(max(s - p, 0) for s, (_, p) in zip(slots, chunks, strict=True))]
    total = cu[-1]
    expected = REFERENCES[kind](total, n, cu) if kind == "packed" else REFERENCES[kind](total, n)
    check_partition(kind, expected, total)
    ids = reference.sequence_ids(cu)
    for rank in range(n):
        layout = TokenLayout.packed(torch.tensor(cu), torch.tensor(real), cp_size=n, cp_rank=rank, kind=kind)
        assert held(layout) == [piece.tolist() for piece in expected]
        assert layout.local_index.tolist() == expected[rank].tolist()
        assert layout.local_cu.tolist() == [int((ids[expected[rank]] < j).sum()) for j in range(len(cu))]
    assert layout.sequence_ids.tolist() == ids.tolist()
    assert layout.position_ids.tolist() == reference.position_ids(cu).tolist()
    assert layout.padding_mask.tolist() == reference.padding_mask(cu, real).tolist()
    assert np.concatenate(expected)[layout.inverse.numpy()].tolist() == list(range(total))
