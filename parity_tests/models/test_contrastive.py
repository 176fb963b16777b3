"""Parity of contrastive_loss: pairs over dp, against the vectors of all ranks."""

import jax.numpy as jnp
import pytest
import torch
from jax import lax
from torch import Tensor

from jax_ref.models import contrastive_loss as reference
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from parity_tests.slow import slow_but
from shardproof import CaseSpec, Cost, check_cases, scheme, values
from shardproof.engines.engines import run
from torch_impl.collectives import all_reduce
from torch_impl.models import contrastive_loss

INT64 = 8
DRAW = dict.fromkeys(("queries", "keys", "log_scale"), values("normal", "ties"))


def gather_cost(c):
    vectors, counted = 2 * c.b // c.dp * c.d, c.dp > 1
    return Cost(
        forward={"all_gather": (1 + counted, counted * INT64 + vectors * c.itemsize)},
        backward={"reduce_scatter": (1, c.dp * vectors * c.accumulator_itemsize)},
    )


@scheme(
    reference=reference,
    contract=contrastive_loss,
    mesh={"dp": (1, 2, 4)},
    inputs={"queries": "b/dp d", "keys": "b/dp d", "log_scale": "dp=R"},
    outputs="dp=P",
    dims={"b": (4, 8), "d": (2, 6)},
    draw=DRAW,
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("b", "d"),
    roundings=4,  # scores, d scores, the terms of d queries as query and as negative
    cost=gather_cost,
)
def loss_of_equal_ranks(mesh, queries, keys, log_scale):
    return contrastive_loss(queries, keys, log_scale, mesh["dp"])


def of_some_pairs(queries, keys, log_scale, has_pairs, scale):
    """0 without pairs; a narrow scale is frozen."""
    if scale == "narrow":
        log_scale = lax.stop_gradient(log_scale.astype(jnp.bfloat16).astype(log_scale.dtype))
    return reference(queries, keys, log_scale) if has_pairs else 0.0 * log_scale


@scheme(
    reference=of_some_pairs,
    contract=contrastive_loss,
    mesh={"dp": (1, 2, 3, 8)},
    inputs={"queries": "b/dp:ragged d", "keys": "b/dp:ragged d", "log_scale": "dp=R"},
    outputs="dp=P",
    dims={"b": (1, 3, 7), "d": (2, 5)},
    draw=DRAW,
    options={"has_pairs": (True, False), "scale": ("trained", "narrow")},
    dtypes=("float64", "float32", "bfloat16"),
    reduction=("b", "d"),
    roundings=4,
)
def loss_of_unequal_ranks(mesh, queries, keys, log_scale, has_pairs, scale):
    """Ranks have unequally many pairs, or none; in a step without pairs all have none. A narrow scale is frozen."""
    if not has_pairs:
        queries, keys = queries[:0], keys[:0]
    if scale == "narrow":
        log_scale = log_scale.detach().bfloat16()
    return contrastive_loss(queries, keys, log_scale, mesh["dp"])


@scheme(
    reference=reference,
    mesh={"dp": (1, 2, 3)},
    inputs={"queries": "b/dp:ragged d", "keys": "b/dp:ragged d", "log_scale": "dp=R"},
    outputs="dp=I",
    dims={"b": (2, 5), "d": (3,)},
    draw=DRAW,
    dtypes=("float64",),
    reduction=("b", "d"),
)
def contrastive_loss_that_is_averaged(mesh, queries, keys, log_scale):
    """As FSDP averages: the mean of the ranks' shares, each times the number of ranks."""
    dp = mesh.size("dp")
    return all_reduce(contrastive_loss(queries, keys, log_scale, mesh["dp"], averaged_over=dp), mesh["dp"]) / dp


SCHEMES = loss_of_equal_ranks, loss_of_unequal_ranks, contrastive_loss_that_is_averaged
test_parity = parity(slow_but([loss_of_unequal_ranks], SCHEMES), lockstep=20)


@pytest.mark.slow
def test_parity_on_processes():
    check_cases(loss_of_unequal_ranks, 4, engine="gloo")


def test_a_narrow_scale_is_widened_before_its_exponential():
    """To the bit: the exponential of a bfloat16 number is rarely one."""
    log_scale = torch.tensor(2.65625, dtype=torch.bfloat16)
    vectors = torch.linspace(-1, 2, 12).sin().view(4, 3).bfloat16()

    def body(mesh, case):
        return [contrastive_loss(vectors, vectors.flip(0), x, mesh["dp"]) for x in (log_scale, log_scale.float())]

    ((narrow, wide),) = run(body, CaseSpec(scheme="contrastive", mesh={"dp": 1})).results
    assert torch.equal(narrow, wide)


def loss_of(queries: Tensor, keys: Tensor, log_scale: Tensor):
    return lambda mesh: contrastive_loss(queries, keys, log_scale, mesh["dp"])


X, SCALE = torch.ones(2, 3), torch.tensor(0.0)
test_rejection = rejected(
    {"dp": 2},
    [
        (
            "a key too few",
            loss_of(X, X[:1], SCALE),
            "models.contrastive_loss: keys is [1, 3] but queries has b/dp=2: b/dp differs, 1 and 2",
        ),
        (
            "another dtype",
            loss_of(X, X.double(), SCALE),
            "models.contrastive_loss: keys is float64 but queries is float32; convert one of them",
        ),
        (
            "a scale of each row",
            loss_of(X, X, SCALE.expand(2)),
            "models.contrastive_loss: log_scale is [2]; its dims must be []; reshape it to these",
        ),
    ],
)
