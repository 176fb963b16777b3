"""Tensor-parallel plans: checked against a model and applied to it, shared parameters staying shared."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer.hf_plan import get_hf_tp_shard_plan as get_hf_tp_shard_plan
from torch_impl.parallelizer.local_forward import owner_of
from torch_impl.parallelizer.plan_check import check_plan as check_plan
from torch_impl.parallelizer.plan_check import refuse
from torch_impl.parallelizer.plan_keys import styled_modules

Plan = Mapping[str, ParallelStyle]


def apply_plan(model: nn.Module, plan: Plan | None, tp_mesh: DeviceMesh) -> None:
    """Cut the modules that the plan names over a 1-D mesh, in place.

    Parameters become DTensors over tp, with the values of the mesh's first rank. What was one parameter under several
    names stays one, and what was frozen stays frozen; torch's styles give each name its own and thaw it.

    Cost:   1 scatter or broadcast for each parameter named, none on the meta device.
    Errors: those of `check_plan`, before anything is changed.
    """
    refuse(model, plan, tp_mesh)
    cut_modules(model, styled_modules(model, plan or {}), tp_mesh)


def cut_modules(model: nn.Module, styled: Mapping[str, tuple[str, ParallelStyle]], tp_mesh: DeviceMesh) -> None:
    """Cut some modules of a model, each by its style; ties and what is frozen as in `apply_plan`. Checks nothing."""
    ties = tied_names(model)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for name, (_, style) in styled.items():
        parallelize_module(model.get_submodule(name), tp_mesh, style)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen and parameter.requires_grad:
            parameter.requires_grad_(False)
    for first, *others in ties:
        _tie(model, first, others)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names that share one parameter, each in the model's order."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie(model: nn.Module, first: str, others: list[str]) -> None:
    shared = model.get_parameter(first)
    placements = shared.placements if isinstance(shared, DTensor) else None
    for name in others:
        owner, leaf = owner_of(model, name)
        own = owner.get_parameter(leaf)
        if own is shared:
            continue
        if (own.placements if isinstance(own, DTensor) else None) != placements:  # a style of the user's own
            raise ValueError(f"tp_shard_plan: {first!r} and {name!r} share a parameter and were cut in two ways")
        owner.register_parameter(leaf, shared)
