"""The inverse permutation: the rank-major stream, put back in order."""

import pytest
import torch

from jax_ref.layouts import inverse as reference
from torch_impl.layouts import contiguous, dual_chunk_swap, inverse, ragged, striped


def test_golden():
    assert inverse([torch.tensor([0, 3]), torch.tensor([1, 2])]).tolist() == [0, 2, 3, 1]


@pytest.mark.parametrize("layout", [contiguous, dual_chunk_swap, ragged, striped])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_stream_comes_back_in_order(layout, world):
    pieces = layout(4 * world, world)
    back = inverse(pieces)
    assert torch.cat(pieces)[back].tolist() == list(range(4 * world))
    assert back.tolist() == reference([piece.numpy() for piece in pieces]).tolist()
