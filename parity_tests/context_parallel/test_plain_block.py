"""Parity of attention whose blocks are computed by plain operations, few rows at a time."""

import pytest
import torch
from hypothesis import given, settings

from parity_tests import check, every_case
from parity_tests.context_parallel.test_cuda_blocks import Largest
from parity_tests.context_parallel.test_pairs import packed_attention_by_keys
from torch_impl.context_parallel import blocks, plain_block


def test_parity(monkeypatch):
    """Packed sequences have triangles, windows, runs that are filled up and queries that a block leaves blind."""

    def forward(q, k, v, block, scale):
        return plain_block.forward(q, k, v, block.mask, block.is_causal, scale)

    def backward(given, k, v, lse, block, scale):
        cotangent, q, out = given
        return plain_block.backward(cotangent, q, k, v, out, lse, block.mask, block.is_causal, scale)

    monkeypatch.setattr(blocks, "_forward", forward)
    monkeypatch.setattr(blocks, "_backward", backward)
    monkeypatch.setattr(plain_block, "ROWS", 3)

    @settings(max_examples=30)
    @given(every_case(packed_attention_by_keys))
    def example(case):
        check(case)

    example()


def test_a_query_that_sees_nothing_has_no_output_and_no_lse():
    q = torch.ones(1, 2, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False] * 3, [False, True, True]])[None, None]
    out, lse = plain_block.forward(q, q, q, mask, False, 0.5)
    assert out[0, 0, :, 0].ne(0).tolist() == [True, False, True]
    assert lse.isfinite().tolist() == [[[True, False, True]] * 2] and (lse[..., 1] == -torch.inf).all()


def test_a_mask_of_one_row_is_that_of_every_query(monkeypatch):
    monkeypatch.setattr(plain_block, "ROWS", 3)
    x = torch.linspace(-2, 3, 3 * 2 * 4 * 7 * 2, dtype=torch.float64).sin().view(3, 2, 4, 7, 2)
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])[:, None, None]
    found = []
    for seen in (mask, mask.expand(-1, -1, 7, -1)):
        out, lse = plain_block.forward(*x, seen, False, 0.5)
        found.append((out, lse, *plain_block.backward(out, *x, out, lse, seen, False, 0.5)))
    assert all(torch.equal(one, every) for one, every in zip(*found, strict=True))


@pytest.mark.parametrize("keys", [5, 7, 9])
def test_causal_is_a_triangle_from_the_top_left(monkeypatch, keys):
    monkeypatch.setattr(plain_block, "ROWS", 3)
    q = torch.linspace(-2, 3, 4 * 7 * 2, dtype=torch.float64).sin().view(1, 4, 7, 2)
    k, v = torch.linspace(-1, 4, 2 * 2 * keys * 2, dtype=torch.float64).cos().view(2, 1, 2, keys, 2)
    found = []
    for seen, is_causal in ((None, True), (torch.ones(7, keys).tril().bool()[None, None], False)):
        out, lse = plain_block.forward(q, k, v, seen, is_causal, 0.5)
        found.append((out, lse, *plain_block.backward(out, q, k, v, out, lse, seen, is_causal, 0.5)))
    assert all(torch.equal(triangle, mask) for triangle, mask in zip(*found, strict=True))


def test_scores_are_held_for_few_rows():
    heads, size = 2, 8 * plain_block.ROWS
    q, k, v = torch.empty(3, 1, heads, size, 4, dtype=torch.float64, device="meta").unbind()
    with Largest() as largest:
        out, lse = plain_block.forward(q, k, v, None, True, 0.5)
        plain_block.backward(out, q, k, v, out, lse, None, True, 0.5)
    assert largest.numbers == heads * plain_block.ROWS * size


def test_autocast_changes_nothing():
    x = torch.linspace(-2, 3, 3 * 2 * 4 * 7 * 2).sin().view(3, 2, 4, 7, 2)
    found = []
    for is_cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            out, lse = plain_block.forward(*x, None, True, 0.5)
            found.append((out, lse, *plain_block.backward(out, *x, out, lse, None, True, 0.5)))
    assert all(map(torch.equal, *found))
