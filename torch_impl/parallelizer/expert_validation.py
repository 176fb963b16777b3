"""Why the experts of a model cannot be sharded over ep and tp."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_impl.parallelizer.expert_layouts import (
    LINEAR,
    STACKS,
    ExpertLayout,
    clamped_unit,
    expert_modules,
    layout_of,
    sizes_of,
)
from torch_impl.parallelizer.tp_plan import tied_names

SILU = ("SiLU", "SiLUActivation")  # torch's and transformers'


def validate_experts(model: nn.Module, ep: int | None, tp: int = 1, is_stage: bool = False) -> dict[str, nn.Module]:
    """The modules of experts to shard over `ep` and `tp` ranks, which need not exist; none if `ep` is None.

    A pipeline stage (`is_stage`) may have no experts; ep is then an axis of data only.

    Errors: ValueError for a model without experts over several ep ranks, a number of experts that ep does not divide,
            alternating columns that tp does not divide, and experts that `routed_experts` does not compute: other
            stacks, arguments or activations.
    """
    if ep is None:
        return {}
    modules = expert_modules(model)
    if not modules and ep > 1 and not is_stage:
        raise ValueError(
            f"device_mesh: ep={ep}, and {type(model).__name__} has no experts in stacks {' and '.join(STACKS)}; "
            "use dp_shard in place of ep"
        )
    tied = {name for names in tied_names(model) for name in names}
    for name, module in modules.items():
        problem = _problem(module, layout_of(module), ep, tp) or _tie(name, module, tied)
        if problem:
            raise ValueError(f"device_mesh: ep={ep}, and {name!r} {problem}")
    return modules


def _problem(module: nn.Module, layout: ExpertLayout, ep: int, tp: int) -> str | None:
    """Why `routed_experts` cannot compute this module over ep and tp ranks; None if it can."""
    others = [leaf for leaf, _ in module.named_parameters() if leaf not in layout.dims]
    if any(isinstance(module.get_parameter(leaf), DTensor) for leaf in layout.dims):
        return "already has DTensor parameters; parallelize a model once"
    if others:
        return f"has {others[0]!r} beside its stacks, which is not sharded over ep; use tp alone"
    gate_up, down = (module.get_parameter(leaf).shape for leaf in STACKS)
    sizes = sizes_of(module, layout)
    fits = all(
        tuple(module.get_parameter(leaf).shape) == tuple(sizes[dim] for dim in names)
        for leaf, names in layout.dims.items()
    )
    if not fits:
        shapes = " and ".join(f"[{', '.join(layout.dims[leaf])}]" for leaf in STACKS)
        return f"has stacks {list(gate_up)} and {list(down)}, not {shapes}; use tp alone"
    if sizes["e"] % ep:
        return f"has {sizes['e']} experts, which ep does not divide; use an ep that does"
    if layout.gates_and_ups_alternate and sizes["f"] % tp:
        return f"has {sizes['f']} pairs of columns of gate and up, which tp={tp} does not divide; use a tp that does"
    if problem := _unit_problem(module, layout):
        return problem
    if tuple(inspect.signature(module.forward).parameters) != layout.arguments:
        return f"is not called with {', '.join(layout.arguments)}; use tp alone"
    return None


def _unit_problem(module: Any, layout: ExpertLayout) -> str | None:
    """Why the unit between the products is another one than `routed_experts` has."""
    if layout is LINEAR:
        activation = type(getattr(module, "act_fn", None)).__name__
        if activation not in SILU:
            return f"has the activation {activation}, and experts over ep are gated by silu; use tp alone"
        return None
    unit, own_unit = clamped_unit(module), getattr(module, "_apply_gate", None)
    # Two classes have these biases and numbers, and only in one of them gates and ups alternate: compare the results.
    columns = torch.linspace(-2, 2, 8, dtype=torch.float64, device="cpu") * unit.limit
    if own_unit is None or not torch.allclose(own_unit(columns), unit(columns)):
        return "has another unit than gpt-oss's, whose gates and ups alternate; use tp alone"
    return None


def _tie(name: str, module: nn.Module, tied: set[str]) -> str | None:
    shared = [leaf for leaf, _ in module.named_parameters() if f"{name}.{leaf}" in tied]
    return f"shares {shared[0]!r} with another module; untie it, or use tp alone" if shared else None
