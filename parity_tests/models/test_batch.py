"""Parity of models.batch: each token's target, and the rank that has it."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_ref.layouts import packed
from jax_ref.models import next_ids as reference
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.models import IGNORED, Placement, Stream, layout_of, offsets_of, rank_stream, streams_of_rank

T = 24
DOCUMENTS = [
    ([0, 24], [0, 24]),
    ([0, 8, 8, 24], [0, 7, 7, 19]),  # padding inside, and a document of no token
    ([0, 8, 16, 24], [0, 1, 1, 9]),  # one token, none, all
]


def stream(padded, real, keep=None):
    return Stream(torch.arange(T) * 7 % 11, torch.tensor(padded), torch.tensor(real), keep)


@pytest.mark.fast_values(3)
@pytest.mark.parametrize(("padded", "real"), DOCUMENTS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_rank_has_its_shard_of_the_targets(cp, padded, real):
    full = stream(padded, real, keep=torch.arange(T) % 5 != 3)
    targets, is_there = reference(jnp.asarray(full.ids.numpy()), jnp.array(padded), jnp.array(real))
    expected = np.where(np.asarray(is_there) & full.keep.numpy(), np.asarray(targets), IGNORED)
    for rank, positions in enumerate(packed(T, cp, np.array(padded))):
        outcome = rank_stream(full, cp, rank)
        assert outcome.ids.tolist() == [full.ids[positions].tolist()]
        assert outcome.targets.tolist() == [expected[positions].tolist()]


@pytest.mark.parametrize(("padded", "real"), DOCUMENTS)
def test_the_last_token_of_a_document_predicts_nothing(padded, real):
    targets = rank_stream(stream(padded, real), 1, 0).targets[0]
    counted = sum(max(count - 1, 0) for count in np.diff(real))
    assert int((targets != IGNORED).sum()) == counted


def test_contiguous_splits_the_stream_where_documents_do_not_end():
    full = stream([0, 5, 24], [0, 5, 24])
    assert [rank_stream(full, 3, rank, "contiguous").ids.shape for rank in range(3)] == [(1, 8)] * 3


@pytest.mark.parametrize("order", ["dual_chunk_swap", "contiguous"])
def test_each_layout_is_rebuilt_from_a_row_of_the_streams_offsets(order):
    """Streams have different numbers of documents. The tensor is split into its rows, as a schedule splits it."""

    def body(mesh, case):
        placement = Placement(mesh["cp"], mesh["cp"], order=order)
        layouts = [rank_stream(stream(*each), 2, mesh.rank("cp"), order).layout for each in DOCUMENTS]
        again = [layout_of(row, placement) for row in offsets_of(layouts).split(1)]
        for one, other in zip(layouts, again, strict=True):
            assert (one.kind, one.cp_size, one.cp_rank, one.total) == (
                other.kind, other.cp_size, other.cp_rank, other.total,
            )  # fmt: skip
            for name in ("index", "cu_padded", "cu_real"):
                assert torch.equal(getattr(one, name), getattr(other, name))

    run(body, CaseSpec("batch", {"cp": 2}))


def test_dp_ranks_share_the_streams():
    streams = [stream([0, T], [0, T]) for _ in range(4)]
    shares = [streams_of_rank(streams, 2, rank) for rank in range(2)]
    assert all(a is b for a, b in zip(shares[0] + shares[1], streams[::2] + streams[1::2], strict=True))
    with pytest.raises(ValueError, match=re.escape("4 streams cannot be divided by dp=3; pass a multiple")):
        streams_of_rank(streams, 3, 0)


@pytest.mark.parametrize("name", ["ids", "keep"])
def test_inputs_shorter_or_longer_than_the_stream_are_rejected(name):
    tensors = {"ids": torch.arange(T), "keep": torch.ones(T, dtype=torch.bool), name: torch.arange(T - 1) > 0}
    full = Stream(cu_padded=torch.tensor([0, T]), cu_real=torch.tensor([0, T]), **tensors)
    with pytest.raises(ValueError, match=re.escape(f"{name} is [23] but cu_padded ends at 24; pass [t]")):
        rank_stream(full, 2, 0)
