"""How modules of transformers store the experts of a layer, and why some cannot be sharded over ep.

Every such module has two stacks, `gate_up_proj` and `down_proj`. In most families these are [e, 2f, d], the gates
before the ups, and [e, d, f], with silu between them. gpt-oss has them transposed, its gates and ups alternate, each
stack has a bias, and its unit is clamped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torch_impl.expert_parallel import ClampedSwiGLU
from torch_impl.parallelizer.tp_plan import tied_names
from torch_impl.parallelizer.tp_styles import HALVES, STACK_DIMS, shard_of_halves

STACKS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
SILU = ("SiLU", "SiLUActivation")  # torch's and transformers'


@dataclass(frozen=True)
class ExpertLayout:
    """The parameters of a module of experts, each with e as its first dim, and the arguments of its forward.

    `placements` are over tp. `widths` has the place of the dim d in each parameter with such a dim; neither ep nor tp
    shards it. The arguments are tokens, ids and gates. `shapes` are the shapes of the two stacks in words.
    """

    placements: Mapping[str, Callable[[], Placement]]
    widths: Mapping[str, int]
    arguments: tuple[str, str, str]
    shapes: str
    is_transposed: bool  # the stacks are [e, out, in]; `routed_experts` takes [e, in, out]


LINEAR = ExpertLayout(
    placements={"gate_up_proj": lambda: shard_of_halves(1), "down_proj": lambda: Shard(2)},
    widths={"gate_up_proj": 2, "down_proj": 1},
    arguments=("hidden_states", "top_k_index", "top_k_weights"),
    shapes="[e, 2f, d] and [e, d, f]",
    is_transposed=True,
)
GPT_OSS = ExpertLayout(
    # A run of columns has gates and ups: they alternate. The bias of d is added once, by `routed_experts`.
    placements={
        "gate_up_proj": lambda: Shard(2),
        "gate_up_proj_bias": lambda: Shard(1),
        "down_proj": lambda: Shard(1),
        "down_proj_bias": Replicate,
    },
    widths={"gate_up_proj": 1, "down_proj": 2, "down_proj_bias": 1},
    arguments=("hidden_states", "router_indices", "routing_weights"),
    shapes="[e, d, 2f] and [e, f, d]",
    is_transposed=False,
)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold all experts of a layer in the two stacks, by name."""
    return {name: module for name, module in model.named_modules() if all(_is_stack(module, leaf) for leaf in STACKS)}


def layout_of(module: nn.Module) -> ExpertLayout:
    """The layout of a module of experts: gpt-oss's if it has both biases and the unit's two numbers."""
    has_biases = all(isinstance(module._parameters.get(leaf), nn.Parameter) for leaf in BIASES)
    return GPT_OSS if has_biases and hasattr(module, "alpha") and hasattr(module, "limit") else LINEAR


def clamped_unit(module: Any) -> ClampedSwiGLU:
    """The unit of gpt-oss with the numbers of a module."""
    return ClampedSwiGLU(float(module.alpha), float(module.limit))


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


def _is_stack(module: nn.Module, leaf: str) -> bool:
    stack = module._parameters.get(leaf)
    return stack is not None and stack.ndim == STACK_DIMS


def _problem(module: nn.Module, layout: ExpertLayout, ep: int, tp: int) -> str | None:
    """Why `routed_experts` cannot compute this module over ep and tp ranks; None if it can."""
    others = [leaf for leaf, _ in module.named_parameters() if leaf not in layout.placements]
    if any(isinstance(module.get_parameter(leaf), DTensor) for leaf in layout.placements):
        return "already has DTensor parameters; parallelize a model once"
    if others:
        return f"has {others[0]!r} beside its stacks, which is not sharded over ep; use tp alone"
    gate_up, down = (module.get_parameter(leaf).shape for leaf in STACKS)
    e, f = gate_up[0], down[2 if layout.is_transposed else 1]
    if not _fits(module, layout):
        return f"has stacks {list(gate_up)} and {list(down)}, not {layout.shapes}; use tp alone"
    if e % ep:
        return f"has {e} experts, which ep does not divide; use an ep that does"
    if layout is GPT_OSS and f % tp:
        return f"has {f} pairs of columns of gate and up, which tp={tp} does not divide; use a tp that does"
    if problem := _unit_problem(module, layout):
        return problem
    if tuple(inspect.signature(module.forward).parameters) != layout.arguments:
        return f"is not called with {', '.join(layout.arguments)}; use tp alone"
    return None


def _fits(module: nn.Module, layout: ExpertLayout) -> bool:
    """Whether the shapes of a module's parameters belong together."""
    shapes = {leaf: tuple(module.get_parameter(leaf).shape) for leaf in layout.placements}
    e, f = shapes["down_proj"][0], shapes["down_proj"][2 if layout.is_transposed else 1]
    d = shapes["down_proj"][layout.widths["down_proj"]]
    columns = HALVES * f
    if layout.is_transposed:
        return shapes == {"gate_up_proj": (e, columns, d), "down_proj": (e, d, f)}
    of_biases = {"gate_up_proj_bias": (e, columns), "down_proj_bias": (e, d)}
    return shapes == {"gate_up_proj": (e, d, columns), "down_proj": (e, f, d), **of_biases}


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
