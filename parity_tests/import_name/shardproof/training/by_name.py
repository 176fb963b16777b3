"""Translate the hybrid model's parameters from PyTorch's names to the flax module's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_ref.models import Config, HybridLM
from shardproof.declare.declared import flat


def flax_name(name: str) -> str:
    """`layers.0.mlp.up_proj.kernel` for `layers.0.mlp.up_proj.weight`; norms keep their name."""
    if name == "embed_tokens.weight":
        return "embed_tokens.embedding"
    owner = name.removesuffix(".weight")
    return f"{owner}.kernel" if owner != name and owner.endswith(("_proj", "lm_head", "conv1d", "router")) else name


def flax_value(name: str, x: Any) -> Any:
    """The array in flax's layout: matrices are [in, out], a convolution's weight is [k, c]."""
    if name.endswith("conv1d.weight"):
        return x[:, 0].T  # [c, 1, k]
    return x.T if flax_name(name).endswith(".kernel") else x


def flax_model(config: Config, parameters: Mapping[str, Any]) -> HybridLM:
    """The flax module with these parameters. Errors: KeyError for missing or unknown names."""
    graph, state = nnx.split(nnx.eval_shape(lambda: HybridLM(config, rngs=nnx.Rngs(0))))
    expected = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    arrays = {flax_name(name): flax_value(name, jnp.asarray(x)) for name, x in flat(parameters).items()}
    if set(expected) != set(arrays):
        missing, unknown = sorted(set(expected) - set(arrays)), sorted(set(arrays) - set(expected))
        raise KeyError(f"parameters: {missing} are missing, {unknown} unknown")
    leaves = [(path, leaf.replace(arrays[name])) for name, (path, leaf) in expected.items()]
    return nnx.merge(graph, nnx.from_flat_state(leaves))
