"""A model's blocks: find them, group them into FSDP units, recompute, compile and prefetch them.

A block is an element of a list of layers: an nn.ModuleList, or an nn.ModuleDict with numbers as keys, which a pipeline
split leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torch_impl.parallelizer._torch_compat import waited
from torch_impl.parallelizer.memory_budget import budgeted
from torch_impl.parallelizer.multimodal import frozen_parts, multimodal_parts


def blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of every list of layers, in order and each once, without elements that have no parameters.

    Lists inside a block, such as its experts, are not searched; lists directly inside a list are.
    """
    unique = {id(block): block for block in _elements(model, is_inside=False)}
    return [block for block in unique.values() if next(block.parameters(), None) is not None]


def units(model: nn.Module) -> list[list[nn.Module]]:
    """The blocks in groups; FSDP shards each group as one unit.

    Blocks of a frozen vision or audio part are left to the root: on a rank whose batch has no image they do not run,
    and other ranks would wait for it to gather them.
    """
    frozen = {id(inner) for part in frozen_parts(model) for inner in part.modules()}
    return groups_by_parameters(model, [block for block in blocks(model) if id(block) not in frozen])


def groups_by_parameters(model: nn.Module, modules: list[nn.Module]) -> list[list[nn.Module]]:
    """Group modules so that modules with a common parameter are in one group.

    FSDP puts each parameter into one unit, so a module that shares one with the rest of the model is left to the root.
    """
    groups: list[list[nn.Module]] = []
    for module in modules:
        # 1. Merge all groups that share a parameter with this module.
        overlapping = [group for group in groups if _share(module, group)]
        union = [member for group in overlapping for member in group] + [module]
        groups = [group for group in groups if group not in overlapping] + [union]
    # 2. Leave a group to the root if it shares a parameter with a module outside all groups.
    outside = _parameters_outside(model, [module for group in groups for module in group])
    return [group for group in groups if not any(id(p) in outside for module in group for p in module.parameters())]


Policy = Callable[..., CheckpointPolicy]  # takes a context, an operation and its arguments


def save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of matrix products and fused attention; recompute everything else."""
    return CheckpointPolicy.MUST_SAVE if operation in _products() else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_blocks(
    model: nn.Module, every: int = 1, policy: Policy | None = None, scopes: Collection[str] = ("all",)
) -> None:
    """Make backward recompute each block that has a trainable parameter, in place (activation checkpointing).

    With `every=n` only the first block and each n-th after it are recomputed. A `policy` decides for each operation
    whether its result is saved (`torch.utils.checkpoint.create_selective_checkpoint_contexts`); without a policy
    nothing inside a block is saved. `scopes` are "all", or some of "vision", "audio", "multimodal" (both of them) and
    "language", which is the rest.

    Checkpointing is non-reentrant and restores the random state of the first forward, so that gradients are bitwise the
    same. Key-value caches are switched off in the configuration and in nested ones, because a recomputed block would
    append to them twice. If layers share keys and values (`num_kv_shared_layers`), attention is not recomputed.

    Names of modules and parameters do not change. Only one block's inner activations are alive at a time.
    Cost: no collective; one more forward of each block.
    """
    config = getattr(model, "config", None)
    shares_keys = any(getattr(each, "num_kv_shared_layers", 0) for each in _configs(config))
    for each in _configs(config):
        if hasattr(each, "use_cache"):
            each.use_cache = False
    for block in blocks_of(model, scopes)[::every]:
        for module in _without_attention(block) if shares_keys else [block]:
            if any(parameter.requires_grad for parameter in module.parameters()):
                _recompute(module, policy)


def blocks_of(model: nn.Module, scopes: Collection[str]) -> list[nn.Module]:
    """The blocks of the parts of a model that `scopes` name, as in `checkpoint_blocks`."""
    part_of = {id(inner): name for name, part in multimodal_parts(model) for inner in part.modules()}
    wanted = {*scopes, *(("vision", "audio") if "multimodal" in scopes else ())}
    return [each for each in blocks(model) if "all" in scopes or part_of.get(id(each), "language") in wanted]


def compile_blocks(
    model: nn.Module, backend: str, memory_budget: float | None = None, scopes: Collection[str] = ("all",)
) -> None:
    """Compile the forward of each block, in place; names of modules and parameters do not change.

    With a `memory_budget` the blocks in `scopes` save this share of their activations: see `budgeted`. Recomputation is
    compiled with the block. The block's hooks stay outside, including FSDP's, which gathers before the forward. An
    asynchronous collective's result, such as a tp embedding's, is waited for before it enters a block.
    """
    within = [] if memory_budget is None else [id(block) for block in blocks_of(model, scopes)]
    for block in blocks(model):
        compiler = budgeted(backend, memory_budget) if memory_budget is not None and id(block) in within else backend
        block.forward = _after_collectives(torch.compile(block.forward, backend=compiler))


def prefetch_blocks(model: nn.Module, forward: int | None, backward: int | None) -> None:
    """Make each FSDP unit gather this many units ahead in forward and in backward; None keeps torch's own order."""
    heads = [group[0] for group in units(model)]
    sharded: list[FSDPModule] = [head for head in heads if isinstance(head, FSDPModule)]
    for number, unit in enumerate(sharded):
        if forward is not None:
            unit.set_modules_to_forward_prefetch(sharded[number + 1 : number + 1 + forward])
        if backward is not None:
            # Backward runs in reverse: the unit before this one is needed first.
            unit.set_modules_to_backward_prefetch(sharded[max(0, number - backward) : number][::-1])


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
        # A pipeline stage keeps its layers' original numbers, with gaps that a ModuleList cannot have.
        return len(module) > 0 and all(key.isdigit() for key in module)
    return isinstance(module, nn.ModuleList)


def _share(module: nn.Module, group: list[nn.Module]) -> bool:
    parameters = {id(parameter) for parameter in module.parameters()}
    return any(id(parameter) in parameters for member in group for parameter in member.parameters())


def _parameters_outside(model: nn.Module, modules: list[nn.Module]) -> set[int]:
    """The ids of the parameters that modules outside all of these own directly."""
    inside = {id(inner) for module in modules for inner in module.modules()}
    rest = [module for module in model.modules() if id(module) not in inside]
    return {id(parameter) for module in rest for parameter in module.parameters(recurse=False)}


def _recompute(module: nn.Module, policy: Policy | None) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # Made here, and only with a policy: torch's compiler does not accept a context from a closure.
        if policy is not None:
            kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    # Set it on the instance: parameters keep their names, and hooks run once, outside the recomputation.
    module.forward = recomputed


def _after_collectives(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for collectives before a compiled forward: torch 2.13's compiler drops a pending tensor's gradient."""

    @functools.wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Wait for top-level tensors only: a key-value cache among the arguments must stay the same object.
        return compiled(*map(waited, args), **{name: waited(x) for name, x in kwargs.items()})

    return forward


@functools.cache
def _products() -> frozenset[Any]:
    aten = torch.ops.aten
    names = ("mm", "addmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu")
    names += ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
    return frozenset(getattr(aten, name).default for name in names if hasattr(aten, name))


def _without_attention(block: nn.Module) -> list[nn.Module]:
    return [child for name, child in block.named_children() if "attn" not in name and "attention" not in name]


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and the configurations nested in it."""
    if config is None:
        return
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)
