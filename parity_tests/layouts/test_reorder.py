"""Full streams put from one order into another: goldens, the reference, round trips, gradients, messages."""

from itertools import accumulate

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jax_ref.layouts import reference
from parity_tests.parity import parity
from shardproof import Cost, integers, offsets, scheme
from torch_impl.collectives import all_gather
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.reorder import (
    _deinterleave_packed_seqs,
    _redo_attention_load_balancing,
    _reinterleave_packed_seqs,
    _reorder_chunks,
    _undo_attention_load_balancing,
)

MENU = dict(mesh={"cp": (1, 2, 3)}, dtypes=("float32", "float64"))
PACKED = dict(
    MENU,
    dims={"n": (4, 6, 3), "t": (24, 36, 12)},
    draw={"padded": offsets("t", padded=True)},
    rank_options={"fill": (0, 2)},
)


def identity(x, padded):
    return x


def with_fill(cu_seqlens, count):
    """The offsets with this many negative entries at the end, as rows of a table have them."""
    return torch.nn.functional.pad(cu_seqlens, (0, count), value=-1000)


def gather_cost(of):
    def cost(case):
        size = of(case)
        return Cost(
            forward={"all_gather": (1, size // case.cp * case.itemsize)},
            backward={"reduce_scatter": (1, size * case.accumulator_itemsize)},
        )

    return cost


@scheme(
    reference=identity,
    contract=all_gather,
    inputs={"x": "t/cp:packed d", "padded": "n"},
    cost=gather_cost(lambda c: c.t * c.d),
    **PACKED,
)
def gathered_and_put_in_order(mesh, x, padded, fill):
    n, padded = mesh.size("cp"), with_fill(padded, fill)
    rank_major = all_gather(x, mesh["cp"], out="R")
    return _undo_attention_load_balancing(_deinterleave_packed_seqs(rank_major, padded // n, n), n, padded)


@scheme(
    reference=identity,
    inputs={"x": "t d cp=R", "padded": "n"},
    outputs="t/cp:packed d",
    cost=lambda c: Cost(),
    **PACKED,
)
def sharded_in_rank_order(mesh, x, padded, fill):
    n, padded = mesh.size("cp"), with_fill(padded, fill)
    rank_major = _reinterleave_packed_seqs(_redo_attention_load_balancing(x, n, padded), padded // n, n)
    return rank_major.chunk(n)[mesh.rank("cp")]


@scheme(
    reference=lambda x: x,
    contract=all_gather,
    inputs={"x": "b s/cp:dual_chunk_swap d"},
    outputs="b s d cp=R",
    cost=gather_cost(lambda c: c.b * c.s * c.d),
    **MENU,
)
def gathered_dense_and_put_in_order(mesh, x):
    rank_major = all_gather(x, mesh["cp"], out="R", dim=1)
    return _undo_attention_load_balancing(rank_major, mesh.size("cp"))


@scheme(
    reference=lambda x: x,
    inputs={"x": "b s d cp=R"},
    outputs="b s/cp:dual_chunk_swap d",
    cost=lambda c: Cost(),
    **MENU,
)
def sharded_in_rank_order_dense(mesh, x):
    return _redo_attention_load_balancing(x, mesh.size("cp")).chunk(mesh.size("cp"), 1)[mesh.rank("cp")]


def next_chunks(x, padded, packed, mesh):
    """Of 2 n chunks of each sequence the one that follows, and of the last the first."""
    g, chunks = jnp.arange(len(x)), 2 * mesh["cp"]
    sequence = (padded[1:][None, :] <= g[:, None]).sum(1)
    start, length = padded[sequence], jnp.diff(padded)[sequence] // chunks
    chunk, place = jnp.divmod(g - start, length)
    return x[start + (chunk + 1) % chunks * length + place]


@scheme(
    reference=next_chunks,
    inputs={"x": "t d cp=R", "padded": "n", "packed": "t/cp:packed"},
    outputs="t d cp=R",
    cost=lambda c: Cost(),
    **{**PACKED, "draw": {**PACKED["draw"], "packed": integers(0, 9)}},
)
def chunks_that_follow(mesh, x, padded, packed, fill):
    return _reorder_chunks(x, [*range(1, 2 * mesh.size("cp")), 0], with_fill(padded, fill))


SCHEMES = (
    gathered_and_put_in_order,
    sharded_in_rank_order,
    gathered_dense_and_put_in_order,
    sharded_in_rank_order_dense,
    chunks_that_follow,
)
test_parity = parity(SCHEMES, lockstep=15)


def rows(count):
    return torch.arange(count)[:, None]


def cu(*offsets):
    return torch.tensor(offsets)


def flat(x):
    return x.flatten().tolist()


def test_golden():
    assert flat(_reorder_chunks(rows(6), [1, 0], cu(0, 2, 6))) == [1, 0, 4, 5, 2, 3]
    assert flat(_deinterleave_packed_seqs(rows(12), cu(0, 2, 6), 2)) == [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11]
    assert flat(_reinterleave_packed_seqs(rows(12), cu(0, 2, 6), 2)) == [0, 1, 4, 5, 6, 7, 2, 3, 8, 9, 10, 11]
    assert flat(_undo_attention_load_balancing(rows(6)[None], 3)) == [0, 2, 4, 5, 3, 1]
    assert flat(_redo_attention_load_balancing(rows(6)[None], 3)) == [0, 5, 1, 4, 2, 3]
    assert flat(_undo_attention_load_balancing(rows(4), 1, cu(0, 2, 4))) == [0, 1, 2, 3]


chunk_counts = st.lists(st.integers(0, 3), max_size=5)
sizes = st.sampled_from([1, 2, 3, 4])


@given(chunk_counts, st.permutations(range(4)), st.integers(1, 4))
def test_chunks_are_the_reference(counts, order, m):
    order = sorted(order[:m], key=order[:m].index)
    order = [sorted(order).index(j) for j in order]
    offsets = [0, *accumulate(m * count for count in counts)]
    x = rows(offsets[-1])
    assert flat(_reorder_chunks(x, order, torch.tensor(offsets))) == flat(
        reference.reorder_chunks(x.numpy(), order, offsets)
    )
    dense = torch.arange(2 * m * 3).view(2, 3 * m, 1)
    assert flat(_reorder_chunks(dense, order)) == flat(reference.reorder_chunks(dense.numpy(), order))


@given(chunk_counts, sizes)
def test_balancing_and_interleaving_are_the_reference_and_each_other_undone(counts, n):
    offsets = [0, *accumulate(2 * n * count for count in counts)]
    local = [offset // n for offset in offsets]
    x, full_offsets, local_offsets = rows(offsets[-1]), torch.tensor(offsets), torch.tensor(local)
    balancing = {
        _undo_attention_load_balancing: reference.undo_attention_load_balancing,
        _redo_attention_load_balancing: reference.redo_attention_load_balancing,
    }
    interleaving = {
        _deinterleave_packed_seqs: reference.deinterleave_packed_seqs,
        _reinterleave_packed_seqs: reference.reinterleave_packed_seqs,
    }
    pairs = [(balancing, (n, full_offsets), (n, offsets)), (interleaving, (local_offsets, n), (local, n))]
    for references, args, plain in pairs:
        for function, stated in references.items():
            assert flat(function(x, *args)) == flat(stated(x.numpy(), *plain))
        there, back = references
        assert torch.equal(back(there(x, *args), *args), x)
        assert torch.equal(there(back(x, *args), *args), x)
    layout = TokenLayout.packed(full_offsets, cp_size=n, cp_rank=0)
    rank_major = layout.index.reshape(-1, 1)
    assert torch.equal(
        _undo_attention_load_balancing(_deinterleave_packed_seqs(rank_major, local_offsets, n), n, full_offsets), x
    )


def test_one_sequence_is_together_in_rank_order():
    assert flat(_deinterleave_packed_seqs(rows(8), cu(0, 4), 2)) == list(range(8))
    assert flat(_deinterleave_packed_seqs(rows(0), cu(0), 2)) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_any_dtype_and_strides(dtype):
    x = torch.arange(24).view(2, 12).T.to(dtype)
    y = _reorder_chunks(x, [1, 0], cu(0, 4, 12))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.float(), x.float()[[2, 3, 0, 1, 8, 9, 10, 11, 4, 5, 6, 7]])


def test_it_differentiates_twice():
    x = torch.arange(6.0, dtype=torch.float64)[:, None].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: _reorder_chunks(x, [1, 2, 0], cu(0, 3, 6)) ** 2, x)


@pytest.mark.parametrize(
    "reorder",
    [
        lambda x, cu: _redo_attention_load_balancing(x, 2, cu),
        lambda x, cu: _undo_attention_load_balancing(x, 2, cu),
        lambda x, cu: _reinterleave_packed_seqs(x, cu, 1),
        lambda x, cu: _deinterleave_packed_seqs(x, cu, 1),
    ],
)
def test_caches_built_in_inference_serve_training(reorder):
    x, offsets = torch.arange(12.0)[:, None].requires_grad_(), cu(0, 4, 12)
    with torch.inference_mode():
        first = reorder(x, offsets)
    again = reorder(x, offsets)
    again.sum().backward()
    assert torch.equal(first, again) and x.grad.eq(1.0).all()


def wide(rows):
    return torch.zeros(rows, 2)


REJECTED = [
    (
        lambda: _reorder_chunks(wide(6), [0, 2], cu(0, 6)),
        ValueError,
        "layouts._reorder_chunks: order=[0, 2] is not a permutation of 0..1",
    ),
    (
        lambda: _reorder_chunks(wide(6), [], cu(0, 6)),
        ValueError,
        "layouts._reorder_chunks: order=[] is not a permutation of 0..-1",
    ),
    (
        lambda: _undo_attention_load_balancing(wide(10)[None], 2),
        ValueError,
        "layouts._undo_attention_load_balancing: s=10 is not a multiple of 4 chunks; pad to 12",
    ),
    (
        lambda: _redo_attention_load_balancing(wide(3)[None], 2),
        ValueError,
        "layouts._redo_attention_load_balancing: s=3 is not a multiple of 4 chunks; pad to 4",
    ),
    (
        lambda: _undo_attention_load_balancing(wide(14), 2, cu(0, 8, 14)),
        ValueError,
        "layouts._undo_attention_load_balancing: sequence 1 has length 6, which is not a multiple of 4 chunks; "
        "pad to 8",
    ),
    (
        lambda: _undo_attention_load_balancing(wide(12), 2, cu(0, 8)),
        ValueError,
        "layouts._undo_attention_load_balancing: cu_seqlens ends at 8 but input_ has 12 rows; "
        "this function takes the padded offsets of the whole stream",
    ),
    (
        lambda: _deinterleave_packed_seqs(wide(12), cu(0, 4, 12), 2),
        ValueError,
        "layouts._deinterleave_packed_seqs: cu_seqlens ends at 12 = the whole stream; "
        "this function takes local offsets (global // 2)",
    ),
    (
        lambda: _reinterleave_packed_seqs(wide(12), cu(0, 5), 2),
        ValueError,
        "layouts._reinterleave_packed_seqs: cu_seqlens ends at 5, 10 rows over cp=2, not 12; "
        "this function takes local offsets (global // 2)",
    ),
    (
        lambda: _reorder_chunks(wide(6)[None], [0, 1], cu(0, 6)),
        ValueError,
        "layouts._reorder_chunks: input_ is [1, 6, 2]; [t, w] goes with cu_seqlens",
    ),
    (
        lambda: _reorder_chunks(wide(6), [0, 1]),
        ValueError,
        "layouts._reorder_chunks: input_ is [6, 2]; [b, s, w] goes without cu_seqlens",
    ),
    (
        lambda: _undo_attention_load_balancing(wide(6), 0, cu(0, 6)),
        ValueError,
        "layouts._undo_attention_load_balancing: cp_size=0 must be at least 1",
    ),
    (
        lambda: _deinterleave_packed_seqs(wide(6), cu(0, 6), 0),
        ValueError,
        "layouts._deinterleave_packed_seqs: cp_size=0 must be at least 1",
    ),
    (
        lambda: _reorder_chunks(wide(6), [0, 1], torch.tensor([0.0, 6.0])),
        TypeError,
        "layouts._reorder_chunks: cu_seqlens: dtype is float32; offsets are integers",
    ),
    (
        lambda: _deinterleave_packed_seqs(wide(6), None, 2),
        TypeError,
        "layouts._deinterleave_packed_seqs: cu_seqlens=None are not offsets; pass a row of integers",
    ),
    (
        lambda: _reorder_chunks(wide(6), [0, 1], cu(0, 4, 2, 6)),
        ValueError,
        "layouts._reorder_chunks: cu_seqlens: sequence 1 runs from 4 back to 2; offsets never decrease",
    ),
]


@pytest.mark.parametrize(("call", "kind", "sentence"), REJECTED, ids=[text[:70] for _, _, text in REJECTED])
def test_rejection(call, kind, sentence):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == sentence


def test_filled_offsets_are_stripped():
    assert flat(_reorder_chunks(rows(6), [1, 0], cu(0, 2, 6, -1000, -1000))) == [1, 0, 4, 5, 2, 3]
