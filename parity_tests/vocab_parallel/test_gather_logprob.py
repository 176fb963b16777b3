"""Parity of vocab_parallel.gather_logprob."""

import numpy as np
import pytest
import torch

from jax_ref.vocab_parallel import gather_logprob
from parity_tests.vocab_parallel.chunk_sizes import calls_of_all
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED, ignored
from parity_tests.vocab_parallel.rounding import equal_to_rounding
from parity_tests.vocab_parallel.saved import NOTHING_SAVED, saved_beside, saved_in_inference
from parity_tests.vocab_parallel.shard import owned_range, wants_no_gradient
from shardproof import CaseSpec, Cost, scheme
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp


@scheme(
    reference=gather_logprob,
    mesh={"tp": (1, 2, 3, 4)},
    contract=vp.ChunkedDistributedGatherLogprob,
    inputs={"logits": "b s v/tp:ragged", "ids": "b s k"},
    draw={"ids": SOME_IGNORED},
    dims={"k": (1, 2, 3, 8, 0)},
    rank_options={"chunk_size": (None, 1, 2, 5)},
    dtypes=("float32", "float64", "bfloat16", "float16"),
    reduction=("v",),
    sums="float32",
    nan_cotangents={"out": ignored("ids")},
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, (2 + c.k) * c.b * c.s))),
)
@pytest.mark.cases(5, engine="gloo")
@pytest.mark.cases
def gathered_logprob(mesh, logits, ids, chunk_size):
    own_size = chunk_size and chunk_size + mesh.rank("tp")  # each rank may have another size
    return vp.ChunkedDistributedGatherLogprob.apply(
        logits, ids, *owned_range(mesh), own_size, mesh["tp"], wants_no_gradient()
    )


def normal(*shape):
    return np.random.Generator(np.random.Philox(key=[11, 0])).standard_normal(shape)


def judged(logits, ids, tp, **options):
    """The report on given logits and ids."""
    (b, s, v), k = logits.shape, ids.shape[-1]
    case = gathered_logprob.case(tp=tp, b=b, s=s, v=v, k=k, dtype="float32", **options)
    return verify_case(gathered_logprob, case, arrays={"logits": logits, "ids": ids})


def on_ranks(tp, logits, ids, cotangent):
    """(value, gradient of this rank's columns) of each rank; the vocabulary is in equal shards."""
    width = logits.shape[-1] // tp

    def body(mesh, case):
        start = mesh.rank("tp") * width
        z = logits[..., start : start + width].clone().requires_grad_()
        y = vp.ChunkedDistributedGatherLogprob.apply(z, ids, start, start + width, None, mesh["tp"])
        return y.detach().numpy(), torch.autograd.grad(y, z, cotangent)[0].numpy()

    return run(body, CaseSpec(scheme="gather_logprob", mesh={"tp": tp})).results


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_boundary_ids_and_out_of_vocabulary_ids(tp):
    v, width = 8, 8 // tp
    borders = [id for start in range(0, v, width) for id in (start, start + width - 1)]
    ignored_ids = [-100, -1, v, v + 7, 2**40]
    judged(normal(1, 1, v), np.array([[borders + ignored_ids]]), tp).raise_if_failed()
    logits, only_ignored = torch.from_numpy(normal(1, 2, v)), torch.tensor([[ignored_ids, ignored_ids]])
    for y, gradient in on_ranks(tp, logits, only_ignored, torch.ones(1, 2, 5, dtype=torch.float64)):
        assert (y == 0.0).all() and (gradient == 0.0).all()


MASKS = {
    "first and last column of each shard": [0, 3, 4, 7],
    "a whole shard": [0, 1, 2, 3],
    "all but one column": [0, 1, 2, 3, 4, 6, 7],
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_columns_do_not_leak(mask, tp):
    logits, ids = normal(1, 3, 8), np.tile(np.arange(8), (1, 3, 1))  # every column is asked for, the masked ones too
    logits[..., MASKS[mask]] = -np.inf
    report = judged(logits, ids, tp)
    report.raise_if_failed()
    for tensor in report.tensors:
        assert not np.isnan(tensor.got).any()


def test_all_ids_give_the_full_log_softmax():
    logits = torch.from_numpy(normal(2, 3, 8)).float()
    everything = torch.arange(8).expand(2, 3, 8)

    def body(mesh, case):
        start = 4 * mesh.rank("tp")
        shard = logits[..., start : start + 4]
        y = vp.ChunkedDistributedGatherLogprob.apply(shard, everything, start, start + 4, None, mesh["tp"])
        return torch.equal(y[..., start : start + 4], vp._compute_distributed_log_softmax(shard, mesh["tp"]))

    assert run(body, CaseSpec(scheme="gather_logprob", mesh={"tp": 2})).results == (True, True)


def test_the_order_of_ids_is_the_order_of_the_results():
    logits, ids = torch.from_numpy(normal(1, 2, 8)).float(), torch.tensor([[[6, 1, -100, 3], [0, 0, 7, 4]]])
    order = torch.tensor([2, 0, 3, 1])
    cotangent = torch.from_numpy(normal(1, 2, 4)).float()
    plain = on_ranks(2, logits, ids, cotangent)
    permuted = on_ranks(2, logits, ids[..., order], cotangent[..., order])
    for (y, _), (z, _) in zip(plain, permuted, strict=True):
        np.testing.assert_array_equal(y[..., order], z)


def test_a_duplicated_id_asks_twice():
    """The comparison is exact, because the cotangents and the probabilities are powers of two."""
    logits = torch.zeros(1, 1, 8)
    ones = torch.ones(1, 1, 2)
    gradient = np.concatenate([g for _, g in on_ranks(2, logits, torch.tensor([[[5, 5]]]), ones)], -1)
    np.testing.assert_array_equal(gradient[0, 0], 2 * (np.arange(8) == 5) - 2 / 8)


@pytest.mark.parametrize("tp", [1, 2])
def test_duplicates_of_a_certain_id_keep_their_digits(tp):
    """The gradient is own (1 - p) - p others: if p is nearly 1 and all slots have this id, no large sums cancel."""
    logits = normal(1, 2, 8)
    logits[..., 6] += 24.0
    judged(logits, np.full((1, 2, 5), 6), tp).raise_if_failed()


def test_no_chunk_size_changes_the_ledger():
    calls = calls_of_all(gathered_logprob, (None, *range(1, 9)), tp=2, b=2, s=5, v=6, k=3, seed=3)
    assert calls == {("all_gather", "fwd")}


def test_gradcheck():
    def body(mesh, case):
        z = torch.from_numpy(normal(2, 3, 6)).requires_grad_()
        ids = torch.tensor([[[0, 4], [5, 5], [-100, 2]], [[3, 1], [-1, -1], [2, 0]]])
        apply = vp.ChunkedDistributedGatherLogprob.apply
        return torch.autograd.gradcheck(lambda x: apply(x, ids, 0, 6, 2, mesh["tp"]), z)

    assert run(body, CaseSpec(scheme="gather_logprob", mesh={"tp": 1})).results == (True,)


@pytest.mark.parametrize("k", [1, 4])
def test_saves_the_logits_by_reference_and_a_few_bytes_per_token(k):
    def body(mesh, case):
        z, ids = torch.zeros(2, 3, 64, requires_grad=True), torch.zeros(2, 3, k, dtype=torch.int64)
        return saved_beside((z,), lambda: vp.ChunkedDistributedGatherLogprob.apply(z, ids, 0, 64, None, mesh["tp"]))

    result = run(body, CaseSpec(scheme="gather_logprob", mesh={"tp": 1})).results
    assert result == ((1, (8 + 4 * k) * 2 * 3),)


def test_a_nan_row_with_an_id_shows_in_its_gradient_whatever_the_cotangents():
    """As in torch: a loss mask of 0 hides no NaN of a token that is scored."""

    def body(mesh, case):
        z, start = torch.zeros(1, 2, 4), 4 * mesh.rank("tp")
        z[0, 0] = torch.nan
        ids = torch.tensor([[[0, 5], [1, 6]]])
        y = vp.ChunkedDistributedGatherLogprob.apply(z.requires_grad_(), ids, start, start + 4, None, mesh["tp"])
        return torch.autograd.grad(y, z, torch.zeros_like(y))[0].isnan().all(-1).tolist()

    assert run(body, CaseSpec(scheme="gather_logprob", mesh={"tp": 2})).results == ([[True, False]],) * 2


def test_inference_only_saves_nothing():
    def body(mesh, case):
        z, ids = torch.zeros(1, 2, 4, requires_grad=True), torch.zeros(1, 2, 3, dtype=torch.int64)
        return saved_in_inference(lambda: vp.ChunkedDistributedGatherLogprob.apply(z, ids, 0, 4, 1, mesh["tp"], True))

    assert run(body, CaseSpec(scheme="gather_logprob", mesh={"tp": 1})).results == (NOTHING_SAVED,)


STRIDES = {
    "short": lambda z: z[:, :-1],
    "transposed": lambda z: z.transpose(0, 1),
    "columns first": lambda z: z.permute(2, 0, 1),
    "one token": lambda z: z[1, 1],
    "four dims": lambda z: z.unflatten(1, (1, 5)),
    "no token": lambda z: z[:, :0],
}


@pytest.mark.parametrize("strides", STRIDES)
def test_leading_dims_strides_and_expanded_cotangents_change_nothing(strides):
    def body(mesh, case):
        z = STRIDES[strides](torch.from_numpy(normal(2, 5, 6)))
        v = z.shape[-1]
        ids = (torch.arange(z.shape[:-1].numel() * 3) % v).view(*z.shape[:-1], 3)
        results = []
        for shard, index in ((z, ids.repeat_interleave(2, -1)[..., ::2]), (z.contiguous(), ids)):
            leaf = shard.detach().requires_grad_()
            y = vp.ChunkedDistributedGatherLogprob.apply(leaf, index, 0, v, 1, mesh["tp"])
            (gradient,) = torch.autograd.grad(y, leaf, torch.tensor(0.5).double().expand(y.shape))
            results.append((y, gradient))
        return all(equal_to_rounding(a, b) for a, b in zip(*results, strict=True)) and results[0][1].shape == z.shape

    assert run(body, CaseSpec(scheme="gather_logprob", mesh={"tp": 1})).results == (True,)
