"""Rows of one index may be added one after another in the tested dtype; a sum over a dim may not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.nn import one_hot

from parity_tests.specimens.small_scheme import summed
from shardproof import scheme, token_below, values, verify
from shardproof.declare.conditions import EXCLUDED_BY_DEFAULT
from shardproof.judge import bridge
from shardproof.judge.rounding import POOL, Trace, by_numpy, by_xla
from shardproof.judge.step import DIRECTIONS
from shardproof.judge.storage import K

EVALUATIONS = {"numpy": by_numpy, "xla": lambda trace, has_tangent: by_xla(trace, has_tangent, dict)}


def indexed(weight, ids):
    return weight[ids]


def embedding_of_torch(weight, ids):
    return torch.nn.functional.embedding(ids, weight)


def vocab_parallel(rows_of, **more):
    """Rows of the ids that a rank owns, zeros for others, added up over the ranks."""

    def embedding(mesh, weight, ids):
        ids = ids - dist.get_rank(mesh["tp"]) * len(weight)
        other = (ids < 0) | (ids >= len(weight))
        rows = rows_of(weight, ids.masked_fill(other, 0))
        return summed(rows.masked_fill(other[..., None], 0.0), mesh["tp"])

    declared = {
        "reference": lambda weight, ids: weight[ids],
        "mesh": {"tp": (1, 2, 4)},
        "inputs": {"weight": "v/tp d", "ids": "b s"},
        "outputs": "b s d tp=I",
        "draw": {"ids": token_below("v"), "weight": values("normal")},
        "excluded_conditions": EXCLUDED_BY_DEFAULT,
    }
    return scheme(**{**declared, **more})(embedding)


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("rows_of", [indexed, embedding_of_torch])
@pytest.mark.parametrize("seed", range(3))
def test_an_embedding_by_torch_is_right(rows_of, seed):
    assert verify(vocab_parallel(rows_of), seed=seed).ok


def test_a_promise_of_float32_sums_is_broken(tmp_path):
    report = verify(vocab_parallel(indexed, sums="float32"), replay_folder=str(tmp_path))
    assert (report.verdict, report.case.dtype) == ("mismatch", "bfloat16")
    assert [tensor.label for tensor in report.tensors if not tensor.ok] == ["d/d weight"]


@pytest.mark.usefixtures("unexplained")
def test_a_product_with_one_hot_rows_is_a_sum_over_a_dim(tmp_path):
    by_product = vocab_parallel(indexed, reference=lambda weight, ids: one_hot(ids, weight.shape[0]) @ weight)
    report = verify(by_product, replay_folder=str(tmp_path))
    assert (report.verdict, report.case.dtype) == ("mismatch", "bfloat16")


@pytest.fixture(params=EVALUATIONS)
def errors_of_additions(request):
    """What the additions of a sum over indices alone add to each element's error, as a multiple of u."""

    def derivative(function, x):
        bridge.start()
        errors = np.full((DIRECTIONS, POOL), 2.0**-60)
        program = EVALUATIONS[request.param](Trace(jax.make_jaxpr(function)(x)), [True])
        _, [tangent] = program([x], [np.zeros((DIRECTIONS, *x.shape))], errors, additions=2.0**60)
        return np.asarray(tangent[0])

    return derivative


def test_the_error_is_a_bound_of_all_additions_of_equal_numbers(errors_of_additions):
    """n ones have the partial sums 1 to n: the additions err by 2 + ... + n at most, and the bound is next to it."""
    for n in (3, 30, 300):
        [ours, other] = errors_of_additions(lambda x: jnp.zeros(2).at[jnp.zeros(len(x), int)].add(x), np.ones(n))
        assert sum(range(2, n + 1)) * 0.7 < K * ours < sum(range(2, n + 1)) * 1.2
        assert other == 0.0


def test_indices_that_occur_once_add_nothing(errors_of_additions):
    order = np.array([3, 1, 0, 2])
    assert (abs(errors_of_additions(lambda x: jnp.zeros(4).at[order].add(x), np.ones(4))) <= 2.0**-59).all()
    assert (abs(errors_of_additions(lambda x: x.sum(keepdims=True), np.ones(4))) <= 2.0**-57).all()
