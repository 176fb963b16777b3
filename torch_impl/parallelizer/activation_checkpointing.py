"""Activation checkpointing: a block keeps its inputs and is computed again in backward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_impl.parallelizer.units import blocks


def checkpoint_blocks(model: nn.Module) -> None:
    """Compute each block with a trainable parameter again in backward, in place.

    Non-reentrant, with the random state of the first time, so that gradients are the same to the bit. Caches are
    switched off in the configuration and those inside it: a block computed again would append to one again. Where
    layers share keys and values (`num_kv_shared_layers`), attention is not computed again and the rest of a block is.

    Names of modules and parameters stay as they are. Between the layers one block's activations are alive.
    Cost: no collective; a block's forward once more.
    """
    config = getattr(model, "config", None)
    shares_keys = any(getattr(each, "num_kv_shared_layers", 0) for each in _configs(config))
    for each in _configs(config):
        if hasattr(each, "use_cache"):
            each.use_cache = False
    for block in blocks(model):
        for module in _without_attention(block) if shares_keys else [block]:
            if any(parameter.requires_grad for parameter in module.parameters()):
                _recompute(module)


def _recompute(module: nn.Module) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    module.forward = recomputed


def _without_attention(block: nn.Module) -> list[nn.Module]:
    return [child for name, child in block.named_children() if "attn" not in name and "attention" not in name]


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    if config is None:
        return
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)
