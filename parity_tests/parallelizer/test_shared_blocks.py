"""Parity of FSDP over blocks that are one module, share a weight or are frozen."""

import jax
import jax.numpy as jnp
import pytest

from parity_tests.parallelizer.shared_blocks import FROZEN, WEIGHTS, gradients_of_step
from shardproof import check_cases, scheme, values


def outputs(weights, x, shared):
    *blocks, head = WEIGHTS[shared]
    for k in blocks:
        x = x + jnp.tanh(x @ weights[k])
    return x @ weights[head]


def gradients(x, weights, shared, frozen):
    found = jax.grad(lambda w: jnp.mean(outputs(w, x, shared) ** 2))(weights)
    return outputs(weights, x, shared), found.at[jnp.array(FROZEN[frozen], int)].set(0.0)


@scheme(
    reference=gradients,
    mesh={"dp_shard": (1, 2, 3)},
    inputs={"x": "b/dp_shard d", "weights": "n d e dp_shard=I"},
    outputs=("b/dp_shard d", "n d e dp_shard=I"),
    dims={"n": (4,), "d": (4, 3), "e": "d"},
    draw=dict.fromkeys(("x", "weights"), values("normal", "ties")),
    nograd=("x", "weights"),
    options={"shared": tuple(WEIGHTS), "frozen": tuple(FROZEN)},
    rank_options={"recomputed": (False, True)},
    dtypes=("float64", "float32"),
    reduction=("b", "d"),
    roundings=12,
)
def step_of_shared_blocks(mesh, x, weights, shared, frozen, recomputed):
    return gradients_of_step(mesh, x, weights, shared, frozen, recomputed)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_parity(engine):
    check_cases(step_of_shared_blocks, 12 if engine == "lockstep" else 2, engine=engine)
