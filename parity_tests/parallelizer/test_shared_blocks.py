"""Parity of FSDP over blocks that are one module, share a weight or are frozen, and how often each is computed."""

import jax
import jax.numpy as jnp
import pytest

from parity_tests.parallelizer.shared_blocks import (
    FROZEN,
    MODULES,
    SCALE,
    SCOPES,
    SHIFTS,
    WEIGHTS,
    drawn_factors,
    gradients_of_steps,
)
from shardproof import check_cases, scheme, values


def outputs(weights, shifts, x, shared, seed):
    *of_blocks, head = WEIGHTS[shared]
    for weight, shift, factor in zip(of_blocks, SHIFTS[shared], drawn_factors(seed), strict=True):
        x = x + jnp.tanh(x @ weights[weight] + shifts[shift][None]) * factor
    return SCALE * x @ weights[head]


def runs_of_blocks(shared, frozen, scope):
    """Each place runs once forward, and again backward if its module is recomputed and has trained parameters."""
    places, frozen_blocks = MODULES[shared], {1} if frozen == "whole middle" else set()
    distinct = [*dict.fromkeys(places)]
    recomputed = {*{"none": [], "second": distinct[::2]}.get(scope, distinct)} - frozen_blocks
    return len(places) + sum(each in recomputed for each in places)


def gradients(x, weights, shifts, shared, frozen, scope, steps, seed):
    def loss(weights, shifts):
        return jnp.mean(outputs(weights, shifts, x, shared, seed) ** 2)

    d_weights, d_shifts = jax.grad(loss, (0, 1))(weights, shifts)
    d_weights = d_weights.at[jnp.array(FROZEN[frozen], int)].set(0.0)
    if frozen == "whole middle":
        d_shifts = d_shifts.at[1].set(0.0)
    runs = jnp.asarray(steps * runs_of_blocks(shared, frozen, scope), x.dtype)
    return outputs(weights, shifts, x, shared, seed), steps * d_weights, steps * d_shifts, runs


@scheme(
    reference=gradients,
    mesh={"dp_shard": (1, 2, 3)},
    inputs={"x": "b/dp_shard d", "weights": "n d e dp_shard=I", "shifts": "m d dp_shard=I"},
    outputs=("b/dp_shard d", "n d e dp_shard=I", "m d dp_shard=I", "dp_shard=I"),
    dims={"n": (4,), "m": (3,), "d": (4, 3), "e": "d"},
    draw=dict.fromkeys(("x", "weights", "shifts"), values("normal", "ties")),
    nograd=("x", "weights", "shifts"),
    options={
        "shared": tuple(WEIGHTS),
        "frozen": tuple(FROZEN),
        "scope": tuple(SCOPES),
        "steps": (1, 2),
        "seed": (None, 0),
    },
    rank_options={"resharded": (None, True, False), "ahead": (None, 2), "lists": (1, 2)},
    dtypes=("float64", "float32"),
    reduction=("b", "d"),
    roundings=12,
)
def step_of_shared_blocks(mesh, x, weights, shifts, shared, frozen, scope, steps, seed, resharded, ahead, lists):
    """Outputs are views, and are written in place; each place draws a factor, as dropout does."""
    tower = {"shared": shared, "frozen": frozen, "lists": lists, "seed": seed}
    switches = {"reshard_after_forward": resharded, "fsdp2_forward_prefetch_depth": ahead}
    switches["fsdp2_backward_prefetch_depth"] = ahead
    return gradients_of_steps(mesh, x, weights, shifts, scope, steps, tower, **switches)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_parity(engine):
    check_cases(step_of_shared_blocks, 12 if engine == "lockstep" else 2, engine=engine)
