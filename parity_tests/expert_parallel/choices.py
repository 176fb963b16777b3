"""Drawn choices of experts, and what a rank sends of them: no JAX, since ranks build their inputs here."""

from __future__ import annotations

import numpy as np

from parity_tests.harness.draw import inputs
from shardproof import drawn

LOADS = ("random", "random", "one", "few", "last", "missing")
MISSING = -1  # the number of no expert, as a token of padding has


def _experts(generator, shape, case):
    """Of each token k experts, no two alike: spread, all on the first ones, on a few or on the last ones, or none."""
    size, (*tokens, k) = case.e, shape
    load = LOADS[generator.integers(len(LOADS))]
    order = generator.random((*tokens, size)).argsort(-1)
    if load == "few":  # every token has the first expert and others
        order = np.where(order == 0, -1, order).argsort(-1).argsort(-1)
        order = order.argsort(-1)
    chosen = {"one": np.arange(size), "last": np.arange(size)[::-1]}.get(load)
    experts = order[..., :k] if chosen is None else np.broadcast_to(chosen[:k], shape)
    if load == "missing":
        experts = np.where(generator.random((*tokens, 1)) < 0.4, MISSING, experts)
    return experts.astype(np.int64)


def chosen_experts():
    """Experts of each token, for a scheme with the dims e and k."""
    return drawn(_experts, integer=True)


def shards(scheme, name, case):
    """What each rank of a case holds of an input, in the order of ranks."""
    (arg,) = (each for each in scheme.inputs if each.name == name)
    full = inputs.full_array(arg, scheme.draws[name], case)
    ranks = inputs.coordinates({axis: case.mesh[axis] for axis in scheme.mesh})
    return [inputs.piece(arg, full, case, coords, scheme.layouts) for coords in ranks]
