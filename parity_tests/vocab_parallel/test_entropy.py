"""Parity of vocab_parallel.entropy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from jax_ref.vocab_parallel import negative_entropy
from parity_tests.vocab_parallel.chunk_sizes import calls_of_all
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.saved import NOTHING_SAVED, saved_beside, saved_in_inference
from parity_tests.vocab_parallel.shard import wants_no_gradient
from shardproof import CaseSpec, Cost, every_case, scheme
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from shardproof.verify_one_case import verify_case
from torch_impl import vocab_parallel as vp


@scheme(
    reference=negative_entropy,
    mesh={"tp": (1, 2, 3, 4)},
    contract=vp.ChunkedDistributedEntropy,
    inputs={"logits": "b s v/tp:ragged"},
    rank_options={"chunk_size": (None, 1, 2, 5)},
    dtypes=("float32", "float64", "bfloat16", "float16"),
    reduction=("v",),
    sums="float32",
    roundings=3,  # log total, mean shifted logit, gradient
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 3 * c.b * c.s))),
)
@pytest.mark.cases(5, engine="gloo")
@pytest.mark.cases
def chunked_distributed_entropy(mesh, logits, chunk_size):
    own_size = chunk_size and chunk_size + mesh.rank("tp")  # each rank may have another size
    return vp.ChunkedDistributedEntropy.apply(logits, own_size, mesh["tp"], wants_no_gradient())


def normal(*shape):
    return np.random.Generator(np.random.Philox(key=[12, 0])).standard_normal(shape)


def judged(logits, tp, dtype="float32"):
    b, s, v = logits.shape
    case = chunked_distributed_entropy.case(tp=tp, b=b, s=s, v=v, dtype=dtype)
    return verify_case(chunked_distributed_entropy, case, arrays={"logits": logits})


def on_ranks(logits, tp):
    """Each rank's (value, gradient of the rank's columns); the vocabulary is in equal shards."""
    width = logits.shape[-1] // tp

    def body(mesh, case):
        start = mesh.rank("tp") * width
        z = logits[..., start : start + width].clone().requires_grad_()
        y = vp.ChunkedDistributedEntropy.apply(z, None, mesh["tp"])
        return y.detach().numpy(), torch.autograd.grad(y.sum(), z)[0].numpy()

    return run(body, CaseSpec(scheme="entropy", mesh={"tp": tp})).results


MASKS = {
    "first and last column of each shard": [0, 3, 4, 7],
    "a whole shard": [0, 1, 2, 3],
    "all but two columns": [0, 1, 2, 4, 6, 7],
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_columns(mask, tp):
    logits = normal(1, 3, 8)
    logits[..., MASKS[mask]] = -np.inf
    report = judged(logits, tp)
    report.raise_if_failed()
    for tensor in report.tensors:
        assert not np.isnan(tensor.got).any()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_finite_column_is_certain(tp):
    logits = torch.full((1, 2, 8), -torch.inf)
    logits[..., 5] = 3.0
    for h, slope in on_ranks(logits, tp):
        np.testing.assert_array_equal(h, np.zeros((1, 2)))
        np.testing.assert_array_equal(slope, np.zeros_like(slope))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_logits_have_the_largest_entropy_and_no_slope(tp):
    for h, slope in on_ranks(torch.full((2, 3, 8), -7.0), tp):
        np.testing.assert_array_equal(h, np.full((2, 3), -np.log1p(np.float32(7))))
        np.testing.assert_array_equal(slope, np.zeros_like(slope))


@given(every_case(chunked_distributed_entropy, dtype="float32"))
@settings(max_examples=few(15))
def test_the_result_lies_between_minus_log_v_and_zero(case):
    report = verify_case(chunked_distributed_entropy, case)
    (tensor,) = (tensor for tensor in report.tensors if tensor.role == "output")
    got, budgets = tensor.got, tensor.element_budgets
    assert (got <= budgets).all() and (got >= -np.log(case.v) - budgets).all()


def test_a_constant_added_to_a_row_changes_nothing():
    plain = torch.arange(24.0).view(1, 3, 8).remainder(7)
    for constant in (-512.0, 8192.0):  # integers: the sum is exact, and so are the next results
        for a, b in zip(on_ranks(plain, 2), on_ranks(plain + constant, 2), strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)


def test_equals_the_entropy_that_comes_with_a_logprob():
    logits = torch.from_numpy(normal(2, 3, 8)).float()

    def body(mesh, case):
        start = 4 * mesh.rank("tp")
        shard, target = logits[..., start : start + 4], torch.zeros(2, 3, dtype=torch.int64)
        owned = dict(vocab_start_index=start, vocab_end_index=start + 4)
        _, h = vp.vocab_parallel_logprob(shard, target, mesh["tp"], with_entropy=True, **owned)
        return torch.equal(h, vp.ChunkedDistributedEntropy.apply(shard, 2, mesh["tp"]))

    assert run(body, CaseSpec(scheme="entropy", mesh={"tp": 2})).results == (True, True)


def test_no_chunk_size_changes_the_ledger():
    calls = calls_of_all(chunked_distributed_entropy, (None, *range(1, 9)), tp=2, b=2, s=5, v=6, seed=3)
    assert calls == {("all_gather", "fwd")}


def test_gradcheck():
    def body(mesh, case):
        z = torch.from_numpy(normal(2, 3, 5)).requires_grad_()
        return torch.autograd.gradcheck(lambda x: vp.ChunkedDistributedEntropy.apply(x, 2, mesh["tp"]), z)

    assert run(body, CaseSpec(scheme="entropy", mesh={"tp": 1})).results == (True,)


def test_saves_the_logits_by_reference_and_twelve_bytes_per_token():
    def body(mesh, case):
        z = torch.zeros(2, 3, 64, requires_grad=True)
        return saved_beside((z,), lambda: vp.ChunkedDistributedEntropy.apply(z, None, mesh["tp"]))

    assert run(body, CaseSpec(scheme="entropy", mesh={"tp": 1})).results == ((1, 12 * 2 * 3),)


def test_inference_only_saves_nothing():
    def body(mesh, case):
        z = torch.zeros(1, 2, 4, requires_grad=True)
        return saved_in_inference(lambda: vp.ChunkedDistributedEntropy.apply(z, 1, mesh["tp"], True))

    assert run(body, CaseSpec(scheme="entropy", mesh={"tp": 1})).results == (NOTHING_SAVED,)
