"""Parity of vocab_parallel.topk: the k largest, and logits at given ids."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from jaxtyping import Float, Int
from torch import Tensor

from jax_ref.vocab_parallel import logits_at, topk
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED
from parity_tests.vocab_parallel.shard import owned_range
from shardproof import CaseSpec, Cost, check, every_case, integers, scheme, values
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp


def topk_of_each(logits, each):
    return topk(logits, len(each))


@scheme(
    reference=topk_of_each,
    mesh={"tp": (1, 2, 3, 4)},
    contract=vp.distributed_vocab_topk,
    inputs={"logits": "b s v/tp:ragged", "each": "k"},
    outputs=("b s k tp=I", "b s k"),
    draw={
        "logits": values(
            "normal", "ties", "neg_inf_mask", "zeros", "iota", "huge", "large", "ties", "neg_inf_mask", "nan"
        ),
        "each": integers(0, 0),  # carries k, a dim of the results
    },
    dims={"k": (2, 3, 8, 1, 0), "e": (0, 1, 0, 2, 16), "v": "k+e"},
    nograd=("logits",),
    ties="ordered",
    rank_options={"chunk_size": (None, 1, 2, 5)},
    dtypes=("float32", "float64", "bfloat16", "float16"),
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 2 * c.b * c.s * c.k + 1))),
)
def vocab_topk(mesh, logits, each, chunk_size) -> tuple[Float[Tensor, "b s k"], Int[Tensor, "b s k"]]:
    start, end = owned_range(mesh)
    own_size = chunk_size and chunk_size + mesh.rank("tp")  # each rank may have another size
    owned = dict(vocab_start_index=start, vocab_end_index=end)
    return vp.distributed_vocab_topk(logits, len(each), mesh["tp"], chunk_size=own_size, **owned)


def logits_at_each(logits, ids):
    return logits_at(logits[:, : ids.shape[1]], ids)


@scheme(
    reference=logits_at_each,
    mesh={"cp": (1, 2), "tp": (1, 2, 4)},
    contract=vp.gather_logits_at_global_indices,
    inputs={"logits": "b f/cp:dual_chunk_swap v/tp:ragged", "ids": "b s k"},
    draw={"ids": SOME_IGNORED},
    dims={"k": (1, 2, 3, 0, 8), "f": "s+e", "e": (0, 1, 2, 3, 5)},
    rank_options={"chunk_size": (None, 1, 2, 5)},
    dtypes=("float32", "float64", "bfloat16", "float16"),
    sums="float32",
    cost=lambda c: Cost(
        forward={
            "all_reduce/tp": (1, c.b * c.f // c.cp * c.k * c.accumulator_itemsize),
            "all_gather/cp": (1, c.b * c.f // c.cp * c.k * c.accumulator_itemsize),
        },
        backward={"reduce_scatter/cp": (1, c.b * c.f * c.k * c.accumulator_itemsize)},
    ),
)
@pytest.mark.cases(5, engine="gloo")
def gathered_logits(mesh, logits, ids, chunk_size):
    start, end = owned_range(mesh)
    owned = dict(vocab_start_index=start, vocab_end_index=end)
    return vp.gather_logits_at_global_indices(
        logits, ids, mesh["tp"], mesh["cp"], chunk_size=chunk_size and chunk_size + mesh.rank("tp"), **owned
    )


def transposed_lookup(logits, ids, g):
    """The transpose of looking logits up, which is linear in g: its own gradient is a lookup again."""
    return jax.vjp(lambda z: logits_at(z, ids), logits)[1](g)[0]


@scheme(
    reference=transposed_lookup,
    mesh={"tp": (1, 2, 4)},
    inputs={"logits": "b s v/tp:ragged", "ids": "b s k", "g": "b s k tp=I"},
    outputs="b s v/tp:ragged",
    draw={"ids": SOME_IGNORED},
    dims={"k": (1, 2, 3, 8)},
    nograd=("logits",),
    reduction=("k",),
    sums="float32",
    wide=False,
    dtypes=("float32", "float64", "bfloat16"),
)
@pytest.mark.cases
def gradient_of_gathered_logits(mesh, logits, ids, g):
    start, end = owned_range(mesh)
    owned = dict(vocab_start_index=start, vocab_end_index=end)
    with torch.inference_mode(False), torch.enable_grad():  # it differentiates, whatever its caller does
        z, g = logits.detach().clone().requires_grad_(), g.clone()
        y = vp.gather_logits_at_global_indices(z, ids, mesh["tp"], **owned)
        return torch.autograd.grad(y, z, g.to(y.dtype), create_graph=g.requires_grad)[0]


@given(every_case(vocab_topk))
def test_parity_of_topk_to_the_bit(case):
    for tensor in check(case).tensors:
        np.testing.assert_array_equal(tensor.got, tensor.want)


@given(every_case(vocab_topk, engine="gloo"))
@settings(max_examples=few(5))
def test_parity_of_topk_on_gloo(case):
    for tensor in check(case).tensors:
        np.testing.assert_array_equal(tensor.got, tensor.want)


@pytest.mark.slow
@given(every_case(gathered_logits))
def test_parity_of_gathered_logits(case):
    report = check(case)
    (tensor,) = (tensor for tensor in report.tensors if tensor.role == "output")
    np.testing.assert_array_equal(tensor.got, tensor.want)


def normal(*shape):
    return np.random.Generator(np.random.Philox(key=[15, 0])).standard_normal(shape)


def on_ranks(mesh, body):
    return run(body, CaseSpec(scheme="topk", mesh=mesh)).results


def largest(logits, k, lengths, chunk_size=None):
    """(values, ids) of rank 0, the vocabulary sharded by lengths; all ranks' results are the same."""

    def body(mesh, case):
        rank = mesh.rank("tp")
        start = sum(lengths[:rank])
        owned = dict(vocab_start_index=start, vocab_end_index=start + lengths[rank])
        local = logits[..., start : start + lengths[rank]]
        result = vp.distributed_vocab_topk(local, k, mesh["tp"], chunk_size=chunk_size, **owned)
        assert not any(x.requires_grad for x in result)
        return [x.numpy() for x in result]

    first, *rest = on_ranks({"tp": len(lengths)}, body)
    for other in rest:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
    return first


@pytest.mark.parametrize("lengths", [(8,), (4, 4), (0, 8), (5, 3, 0), (1, 1, 1, 5)])
@pytest.mark.parametrize("k", [0, 1, 5, 8, 11])
def test_ties_return_the_lowest_ids(k, lengths):
    values, ids = largest(torch.full((2, 3, 8), 4.0, requires_grad=True), k, lengths)
    np.testing.assert_array_equal(ids, np.broadcast_to(np.arange(min(k, 8)), ids.shape))
    np.testing.assert_array_equal(values, np.full((2, 3, min(k, 8)), 4.0))


@pytest.mark.parametrize("lengths", [(4, 4), (1, 7), (0, 8), (2, 1, 5)])
def test_masked_columns_are_returned_last(lengths):
    logits = torch.full((1, 2, 8), -torch.inf)
    logits[:, 0, 6], logits[:, 0, 1] = 1.0, -1.0
    values, ids = largest(logits, 11, lengths)
    np.testing.assert_array_equal(ids[0], [[6, 1, 0, 2, 3, 4, 5, 7], list(range(8))])
    np.testing.assert_array_equal(values[0, 0], [1.0, -1.0] + [-np.inf] * 6)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 7])
def test_neither_shards_nor_chunks_change_the_result(chunk_size):
    logits = torch.from_numpy(normal(2, 5, 12)).round()  # with ties
    unsharded = largest(logits, 4, (12,))
    for lengths in [(6, 6), (3, 3, 3, 3), (0, 1, 11), (9, 0, 3)]:
        for a, b in zip(unsharded, largest(logits, 4, lengths, chunk_size), strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.take_along_axis(logits.numpy(), unsharded[1], -1), unsharded[0])


def test_signs_of_zero_are_equal_and_nan_is_largest():
    values, ids = largest(torch.tensor([[-0.0, 0.0, 1.0, torch.nan, torch.inf]]), 5, (2, 3))
    np.testing.assert_array_equal(ids, [[3, 4, 2, 0, 1]])
    np.testing.assert_array_equal(values, [[np.nan, np.inf, 1.0, 0.0, 0.0]])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (), (7,)])
def test_any_leading_dims(shape):
    values, ids = largest(torch.zeros(*shape, 6), 4, (2, 4))
    assert values.shape == ids.shape == (*shape, 4)


def test_columns_past_the_range_are_no_candidates():
    def body(mesh, case):
        logits = torch.tensor([[1.0, 2.0, 9.0]])  # two ids and a column of padding
        start = 2 * mesh.rank("tp")
        owned = dict(vocab_start_index=start, vocab_end_index=start + 2)
        values, ids = vp.distributed_vocab_topk(logits, 6, mesh["tp"], **owned)
        return values.tolist(), ids.tolist()

    assert on_ranks({"tp": 2}, body) == (([[2.0, 2.0, 1.0, 1.0]], [[1, 3, 0, 2]]),) * 2


def looked_up(logits, ids, tp, **options):
    """Rank by rank: (value, gradient of this rank's columns) for a cotangent of ones."""
    width = logits.shape[-1] // tp

    def body(mesh, case):
        start = mesh.rank("tp") * width
        z = logits[..., start : start + width].clone().requires_grad_()
        owned = dict(vocab_start_index=start, vocab_end_index=start + width)
        y = vp.gather_logits_at_global_indices(z, ids, mesh["tp"], **owned, **options)
        return y.detach().numpy(), torch.autograd.grad(y, z, torch.ones(()).expand(y.shape))[0].numpy()

    return on_ranks({"tp": tp}, body)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_id_is_indexing_and_masked_columns_do_not_leak(tp):
    logits = torch.from_numpy(normal(1, 8, 8)).float()
    logits[..., [0, 3, 4, 7]] = -torch.inf
    ids = torch.arange(8).view(1, 8, 1)
    for y, gradient in looked_up(logits, ids, tp):
        np.testing.assert_array_equal(y, logits.gather(-1, ids).numpy())
        assert ((gradient == 0) | (gradient == 1)).all() and gradient.sum() == 8 // tp


@pytest.mark.parametrize("tp", [1, 2])
def test_out_of_vocabulary_ids_are_zero_and_duplicates_add(tp):
    ids = torch.tensor([[[5, 5, -100, 8], [-1, 15, 2**40, 0]]])
    results = looked_up(torch.full((1, 2, 8), 3.0), ids, tp)
    for y, _ in results:
        np.testing.assert_array_equal(y, [[[3, 3, 0, 0], [0, 0, 0, 3]]])
    gradient = np.concatenate([g for _, g in results], -1)
    np.testing.assert_array_equal(gradient[0], [2 * (np.arange(8) == 5), np.arange(8) == 0])


def test_a_full_vocabulary_needs_no_group():
    z = torch.from_numpy(normal(2, 5, 6)).requires_grad_()
    ids = torch.tensor([[[3], [0], [5]], [[1], [1], [-100]]])
    y = vp.gather_logits_at_global_indices(z, ids, vocab_start_index=0, vocab_end_index=6, chunk_size=2)
    assert torch.equal(y[0, :, 0], z[0, [0, 1, 2], [3, 0, 5]]) and y[1, 2, 0] == 0.0
    assert torch.autograd.gradcheck(
        lambda x: vp.gather_logits_at_global_indices(x, ids, vocab_start_index=0, vocab_end_index=6), z
    )


@pytest.mark.parametrize("padding", [0, 1, 2, 3])
def test_logits_may_cover_more_positions_than_the_ids(padding):
    size, v = 8, 6
    full, ids = torch.from_numpy(normal(1, size, v)).float(), torch.arange(size - padding).view(1, -1, 1) % v

    def body(mesh, case):
        local = vp._get_tokens_on_this_cp_rank(full, mesh.rank("cp"), 2).requires_grad_()
        owned = dict(vocab_start_index=0, vocab_end_index=v)
        y = vp.gather_logits_at_global_indices(local, ids, None, mesh["cp"], **owned)
        (gradient,) = torch.autograd.grad(y, local, torch.ones(()).expand(y.shape))
        return torch.equal(y, full[:, : size - padding].gather(-1, ids)), gradient.sum().item()

    results = on_ranks({"cp": 2}, body)
    assert all(same for same, _ in results)
    assert sum(total for _, total in results) == 2 * (size - padding)  # each of two cp ranks had a cotangent of ones


@pytest.mark.parametrize("v", [16, 4096])
def test_saved_tensors_do_not_grow_with_the_vocabulary(v):
    saved = []
    z = torch.zeros(2, 3, v, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = vp.gather_logits_at_global_indices(
            z, torch.zeros(2, 3, 5, dtype=torch.int64), vocab_start_index=0, vocab_end_index=v
        )
    assert y.grad_fn is not None and sum(x.nbytes for x in saved) == 4 * 2 * 3 * 5


def test_no_chunk_size_changes_the_ledger():
    for route, sizes in [(vocab_topk, {"k": 3, "e": 5}), (gathered_logits, {"cp": 2, "s": 8, "e": 0, "v": 6, "k": 2})]:
        rows = set()
        for chunk_size in (None, 1, 2, 5, 9):
            report = verify_case(route, route.case(**{"tp": 2, "b": 2, "s": 5, **sizes}, seed=3, chunk_size=chunk_size))
            report.raise_if_failed()
            rows.add(tuple((row.rank, row.op, row.dtypes, row.shapes, row.phase) for row in report.ledger.rows))
        assert len(rows) == 1
