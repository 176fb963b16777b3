"""Parity of vocab_parallel.softmax."""

import numpy as np
import pytest
import torch

from jax_ref.vocab_parallel import log_softmax, softmax
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from shardproof import CaseSpec, Cost, scheme
from shardproof.engines.engines import run
from torch_impl import vocab_parallel as vp

WIDE_OUTPUTS = False
DECLARED = dict(
    mesh={"tp": (1, 2, 3, 4)},
    inputs={"logits": "b s v/tp:ragged"},
    outputs="b s v/tp:ragged",
    nograd=("logits",),
    dtypes=("float32", "float64", "bfloat16", "float16"),
    sums="float32",
    reduction=("v",),
    cost=lambda c: Cost(forward=all_gathers(over_tp(c, 2 * c.b * c.s))),
)


@scheme(contract=vp._compute_distributed_log_softmax, reference=log_softmax, **DECLARED)
@pytest.mark.cases
def vocab_parallel_log_softmax(mesh, logits):
    return vp._compute_distributed_log_softmax(logits, mesh["tp"])


@scheme(contract=vp._compute_distributed_softmax, reference=softmax, **DECLARED)
@pytest.mark.cases
def vocab_parallel_softmax(mesh, logits):
    return vp._compute_distributed_softmax(logits, mesh["tp"])


def on_two_ranks(body):
    return run(body, CaseSpec(scheme="vocab_parallel", mesh={"tp": 2}, engine="lockstep")).results


def both(mesh, logits):
    """(log-softmax, softmax) of one rank, as NumPy."""
    functions = (vp._compute_distributed_log_softmax, vp._compute_distributed_softmax)
    return [f(logits, mesh["tp"]).double().numpy() for f in functions]


def test_softmax_is_the_exponential_of_log_softmax():
    def body(mesh, case):
        logits = torch.linspace(-3, 5, 12, dtype=torch.float64).view(2, 6) * (1 + mesh.rank("tp"))
        return both(mesh, logits)

    for log_p, p in on_two_ranks(body):
        np.testing.assert_array_equal(np.exp(log_p).astype(np.float32), p.astype(np.float32))
        assert (p >= 0).all()


def test_a_row_constant_changes_nothing():
    def body(mesh, case):
        logits = torch.arange(12.0).view(2, 6) - 5 * mesh.rank("tp")
        return both(mesh, logits), both(mesh, logits + 8192.0)  # integers: the sum is exact

    for plain, shifted in on_two_ranks(body):
        np.testing.assert_array_equal(plain, shifted)


def test_masked_columns_and_a_masked_shard():
    def body(mesh, case):
        rank = mesh.rank("tp")
        logits = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, 0.0, -torch.inf]])
        logits[1] = -torch.inf if rank == 0 else logits[1]  # the second row is masked on rank 0
        return both(mesh, logits)

    (_, first), (_, second) = on_two_ranks(body)
    np.testing.assert_array_equal(first[:, 1], [0.0, 0.0])
    np.testing.assert_array_equal(first[1], [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(second[1], [0.5, 0.5, 0.0])


def test_a_row_that_is_masked_everywhere_has_no_softmax():
    def body(mesh, case):
        return both(mesh, torch.full((1, 3), -torch.inf))

    assert all(np.isnan(array).all() for pair in on_two_ranks(body) for array in pair)


def test_the_result_has_no_gradient_and_leaves_the_logits_alone():
    def body(mesh, case):
        logits = torch.arange(12.0).view(2, 6).t().requires_grad_()  # columns first
        before = logits.detach().clone()
        results = [
            f(logits, mesh["tp"]) for f in (vp._compute_distributed_log_softmax, vp._compute_distributed_softmax)
        ]
        return [y.requires_grad for y in results], torch.equal(logits, before)

    assert on_two_ranks(body) == (([False, False], True),) * 2
