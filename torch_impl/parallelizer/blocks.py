"""The blocks of a model: which modules they are, how they form units, and how one is computed again in backward.

A block is an element of a list of layers: an nn.ModuleList, or an nn.ModuleDict whose keys are all numbers, as layers
are after a split into stages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of every list, in order, each once; lists inside an element are not entered, those in a list are.

    An element without parameters is none.
    """
    found = {id(block): block for block in _elements(model, is_inside=False)}
    return [block for block in found.values() if next(block.parameters(), None) is not None]


def units(model: nn.Module) -> list[list[nn.Module]]:
    """The blocks in groups, each to be sharded as one."""
    return grouped(model, blocks(model))


def grouped(model: nn.Module, chosen: list[nn.Module]) -> list[list[nn.Module]]:
    """Blocks, those that share a parameter together; one that shares with what is no block is left to the root."""
    groups: list[list[nn.Module]] = []
    for block in chosen:
        touched = [group for group in groups if _share(block, group)]
        merged = [member for group in touched for member in group] + [block]
        groups = [group for group in groups if group not in touched] + [merged]
    others = _outside(model, [block for group in groups for block in group])
    return [group for group in groups if not any(id(p) in others for block in group for p in block.parameters())]


def _elements(module: nn.Module, is_inside: bool) -> Iterator[nn.Module]:
    for child in module.children():
        if _is_list(child):
            yield from _elements(child, is_inside=True)
        elif is_inside:
            yield child
        else:
            yield from _elements(child, is_inside=False)


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return len(module) > 0 and all(key.isdigit() for key in module)
    return isinstance(module, nn.ModuleList)


def _share(block: nn.Module, group: list[nn.Module]) -> bool:
    own = {id(parameter) for parameter in block.parameters()}
    return any(id(parameter) in own for member in group for parameter in member.parameters())


def _outside(model: nn.Module, inside: list[nn.Module]) -> set[int]:
    """Parameters that a module outside of all blocks has of its own."""
    within = {id(module) for block in inside for module in block.modules()}
    rest = [module for module in model.modules() if id(module) not in within]
    return {id(parameter) for module in rest for parameter in module.parameters(recurse=False)}


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
