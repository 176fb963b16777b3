"""Rename the parameters of a Mamba2 mixer from mamba-ssm's names to the flax module's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_ref.mamba import Mamba2
from shardproof.declare.declared import flat

RENAMED = {"in_proj.weight": "in_proj.kernel", "out_proj.weight": "out_proj.kernel", "conv1d.weight": "conv1d.kernel"}
CONVERTERS = {
    "in_proj.weight": jnp.transpose,
    "out_proj.weight": jnp.transpose,
    "conv1d.weight": lambda weight: weight[:, 0].T,  # [c, 1, k] -> [k, c]
}


def flax_mixer(parameters: Mapping[str, Any], **settings: Any) -> Mamba2:
    """The module with these parameters. Errors: KeyError for a name that either side lacks."""
    empty = nnx.eval_shape(lambda: Mamba2(**settings, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(empty)
    expected = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
    arrays = {RENAMED.get(name, name): CONVERTERS.get(name, jnp.asarray)(x) for name, x in flat(parameters).items()}
    if expected != set(arrays):
        raise KeyError(
            f"parameters: {sorted(expected - set(arrays))} are missing, {sorted(set(arrays) - expected)} unknown"
        )
    leaves = [(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(leaves))
