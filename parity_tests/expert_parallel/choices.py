"""Drawn choices of experts, and each rank's part of them. No JAX here, since ranks import this to build inputs."""

from __future__ import annotations

import numpy as np

from shardproof import drawn
from shardproof.draw import inputs

LOADS = ("random", "random", "one", "first", "last", "missing", "dropped", "none")


def _experts(generator, shape, case):
    """k experts for each token, no two alike: in random order, or equal for all tokens; some or all tokens without an
    expert, or some with fewer than k, as capacity leaves them."""
    (*tokens, k), size = shape, case.e
    load = LOADS[generator.integers(len(LOADS))]
    order = generator.random((*tokens, size))
    if load == "first":  # every token has the first expert, and others
        order[..., 0] = -1.0
    if load in ("one", "last"):  # the first k experts have all rows, or the last k
        order = np.broadcast_to(np.arange(size) if load == "one" else -np.arange(size), order.shape)
    experts = order.argsort(-1)[..., :k]
    each = (*tokens, k if load == "dropped" else 1)
    is_missing = generator.random(each) < {"missing": 0.4, "dropped": 0.4, "none": 1.0}.get(load, 0.0)
    # Numbers of no expert: padding usually has -1, and any below 0 or beyond the last expert is one, in 64 bits.
    of_none = generator.choice((-1, -2, -(2**40), size, size + 1, 2**40), is_missing.shape)
    return np.where(is_missing, of_none, experts).astype(np.int64)


def chosen_experts():
    """Experts of each token, for a scheme with the dims e and k."""
    return drawn(_experts, integer=True)


def padding(case, inputs):
    """The rows that have no expert."""
    return ((inputs["experts"] < 0) | (inputs["experts"] >= case.e)).all(-1)


def shards(scheme, name, case):
    """Each rank's shard of an input, in the order of ranks."""
    (arg,) = (each for each in scheme.inputs if each.name == name)
    full = inputs.full_array(arg, scheme.draws[name], case)
    ranks = inputs.coordinates({axis: case.mesh[axis] for axis in scheme.mesh})
    return [inputs.piece(arg, full, case, coords, scheme.layouts) for coords in ranks]
