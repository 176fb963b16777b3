"""Find modules of a rarer dtype for FSDP. An FSDP unit has one dtype, so these modules become units of their own.

A router, a norm or the decays of a state-space model are often float32 in a bfloat16 model. Such a module computes in
its own dtype, and FSDP does not cast its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import nn

from torch_impl.parallelizer.blocks import groups_by_parameters, units


def units_of_rarer_dtypes(model: nn.Module, apart: Iterable[nn.Module] = ()) -> list[list[nn.Module]]:
    """Group the largest modules whose trained parameters have one dtype, but not the usual dtype of their unit.

    `apart` are modules that are units already. Modules that share a parameter are in one group.

    Errors: ValueError if a module itself has parameters of both dtypes, or shares a parameter with a module of the
            other dtype.
    """
    names = {id(module): name for name, module in model.named_modules()}
    sharded_ids = {id(parameter) for module in apart for parameter in module.parameters()}
    rarer_modules: list[nn.Module] = []
    for unit in [*units(model), [model]]:
        sizes: Counter[torch.dtype] = Counter()
        for parameter in _trainable_parameters(unit, sharded_ids):
            sizes[parameter.dtype] += parameter.numel()
        if len(sizes) > 1:
            usual = max(sizes, key=lambda dtype: sizes[dtype])
            rarer_modules += [rarer for module in unit for rarer in _rarer_modules(module, usual, sharded_ids, names)]
        sharded_ids |= {id(parameter) for module in unit for parameter in module.parameters()}
    rarer_modules = list(dict.fromkeys(rarer_modules))  # blocks may share a module
    groups = groups_by_parameters(model, rarer_modules)
    grouped = {id(module) for group in groups for module in group}
    for module in rarer_modules:
        if id(module) not in grouped:
            raise ValueError(f"model: {names[id(module)]!r} shares a parameter with a unit of another dtype; cast one")
    return groups


def _rarer_modules(
    module: nn.Module, usual: torch.dtype, sharded_ids: Set[int], names: Mapping[int, str]
) -> Iterator[nn.Module]:
    dtypes = {parameter.dtype for parameter in _trainable_parameters([module], sharded_ids)}
    if dtypes <= {usual}:
        return
    if usual not in dtypes and len(dtypes) == 1:
        yield module
        return
    for leaf, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and id(parameter) not in sharded_ids and parameter.dtype != usual:
            where = f"{names[id(module)]}.{leaf}".lstrip(".")
            raise ValueError(
                f"model: {where!r} is {_name(parameter.dtype)} in a module of {_name(usual)} parameters, and FSDP "
                "shards one dtype in a unit; put it into a module of its own, or cast it"
            )
    for child in module.children():
        yield from _rarer_modules(child, usual, sharded_ids, names)


def _trainable_parameters(modules: Sequence[nn.Module], sharded_ids: Set[int]) -> list[nn.Parameter]:
    """The parameters that require a gradient and are in no unit yet, each once."""
    parameters = {id(each): each for module in modules for each in module.parameters()}
    return [each for key, each in parameters.items() if each.requires_grad and key not in sharded_ids]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
