"""Shard a model's experts over ep and tp: each rank has e/ep of a layer's experts, and of each its columns over tp.

A transformers module of experts has all experts of a layer in two stacks, and its arguments are tokens, their expert
ids and their gates. The module keeps its place and the names of its parameters, and the router before it does not
change; only the forward is replaced by `routed_experts`, which sends each token to the ranks of its experts and back.

Ranks of ep have different tokens, like ranks of data parallelism. An expert's gradient therefore includes the tokens of
all ep ranks and is reduced over edp only, the ranks with the same experts; every other gradient is reduced over
dp x cp x ep. Ranks of tp have the same tokens: each sends its own part, so that no token is sent twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Shard

from torch_impl.collectives import accumulator, all_gather
from torch_impl.collectives.gathers import own_shard
from torch_impl.expert_parallel import routed_experts
from torch_impl.parallelizer.mesh_axes import MeshAxes
from torch_impl.parallelizer.tp_plan import tied_names
from torch_impl.parallelizer.tp_styles import HALVES, STACK_DIMS, distribute, shard_of_halves

# The stacks of transformers' experts, [e, 2f, d] (gate, then up) and [e, d, f], and the placement of each over tp.
# `routed_experts` takes them transposed.
STACKS: dict[str, Callable[[], Placement]] = {
    "gate_up_proj": lambda: shard_of_halves(1),
    "down_proj": lambda: Shard(2),
}
WIDTHS = {"gate_up_proj": 2, "down_proj": 1}  # the dim of d, which neither ep nor tp shards
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
SILU = ("SiLU", "SiLUActivation")  # torch's and transformers'


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold all experts of a layer in the two stacks, by name."""
    return {name: module for name, module in model.named_modules() if all(_is_stack(module, leaf) for leaf in STACKS)}


def validate_experts(model: nn.Module, ep: int | None, is_stage: bool = False) -> dict[str, nn.Module]:
    """The modules of experts to shard over `ep` ranks, which need not exist; none if `ep` is None.

    A pipeline stage (`is_stage`) may have no experts; ep is then an axis of data only.

    Errors: ValueError for a model without experts over several ep ranks, a number of experts that ep does not divide,
            and experts that `routed_experts` does not compute: other stacks, arguments or activations.
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
        problem = _problem(module, ep) or _tie(name, tied)
        if problem:
            raise ValueError(f"device_mesh: ep={ep}, and {name!r} {problem}")
    return modules


def shard_experts(modules: Mapping[str, nn.Module], axes: MeshAxes) -> None:
    """Shard the stacks over ep and tp, in place, and make each module send its tokens to the ranks of their experts.

        hidden_states "t/ep d tp=I", top_k_index and top_k_weights "t/ep k tp=I"   ->   "t/ep d tp=I"
        gate_up_proj "e 2f d"   ->   "e/ep 2f/tp d", each half /tp        down_proj "e d f"   ->   "e/ep d f/tp"

    The stacks become DTensors over ep and tp, with the values of the mesh's first rank. Their gradients are 1/ep of the
    sum over all rows: FSDP also divides by the number of edp ranks, which makes it the mean over dp x cp x ep.

    Cost:   on construction 1 broadcast of each stack over each axis, none on the meta device. Each forward has the
            collectives of `routed_experts` for this rank's part of the tokens; over tp also 1 all_gather of the outputs
            forward, and 1 of the tokens' and 1 of the gates' gradient backward.
    """
    mesh = axes.expert_mesh
    if mesh is None or axes.ep is None:
        return
    tp_group = None if axes.tp_mesh is None else axes.tp_mesh.get_group()
    ep_group = axes.mesh[axes.ep].get_group()
    for module in modules.values():
        for leaf, on_tp in STACKS.items():
            stack = module.get_parameter(leaf)
            placements = [Shard(0) if name == axes.ep else on_tp() for name in mesh.mesh_dim_names or ()]
            shard = distribute(stack, mesh, placements, source=0)
            module.register_parameter(leaf, nn.Parameter(shard, requires_grad=stack.requires_grad))
        # Set it on the instance: transformers chooses its implementation inside the class's forward.
        module.forward = partial(_routed, module, ep_group, tp_group)


def fsdp_dims(module: nn.Module, ranks: int) -> dict[str, int]:
    """The dim of each stack that FSDP shards over these ranks: the width if they divide it, else the experts.

    The width is not sharded over another axis. So every rank stores equally much, however few experts an ep rank has,
    and the full tensor has one order. FSDP shards only the first dim into unequal parts.
    """
    shapes = {leaf: module.get_parameter(leaf).shape for leaf in STACKS}
    return {leaf: 0 if shapes[leaf][dim] % ranks else dim for leaf, dim in WIDTHS.items()}


def _routed(
    module: nn.Module,
    ep_group: ProcessGroup,
    tp_group: ProcessGroup | None,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The forward of a module of experts: the sum of the experts' outputs for each of this rank's tokens."""
    gate_up, down = (_local_stack(module.get_parameter(leaf), ep_group.size()).transpose(1, 2) for leaf in STACKS)
    gates = top_k_weights.to(accumulator(top_k_weights.dtype))  # the dtype of the weighted sum; often theirs already
    if tp_group is None:
        return routed_experts(hidden_states, gates, top_k_index, gate_up, down, ep_group)
    lengths = _equal_parts(len(hidden_states), tp_group.size())
    x, gates, experts = (own_shard(x, tp_group, lengths) for x in (hidden_states, gates, top_k_index))
    y = routed_experts(x, gates, experts, gate_up, down, ep_group, tp_group)
    return all_gather(y, tp_group, out="I", lengths=lengths)


def _local_stack(stack: Tensor, ep: int) -> Tensor:
    """This rank's shard of a stack; its gradient is divided by the number of ep ranks.

    FSDP's `set_gradient_divide_factor` does not work here: torch 2.13 applies it twice if edp has one rank.
    """
    local = stack.to_local() if isinstance(stack, DTensor) else stack
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / ep)
    return local


def _equal_parts(size: int, parts: int) -> list[int]:
    return [size // parts + (part < size % parts) for part in range(parts)]


def _is_stack(module: nn.Module, leaf: str) -> bool:
    stack = module._parameters.get(leaf)
    return stack is not None and stack.ndim == STACK_DIMS


def _problem(module: nn.Module, ep: int) -> str | None:
    """Why `routed_experts` cannot compute this module over ep ranks; None if it can."""
    gate_up, down = (module.get_parameter(leaf) for leaf in STACKS)
    others = [leaf for leaf, _ in module.named_parameters() if leaf not in STACKS]
    activation = type(getattr(module, "act_fn", None)).__name__
    if isinstance(gate_up, DTensor) or isinstance(down, DTensor):
        return "already has DTensor parameters; parallelize a model once"
    if others:
        return f"has {others[0]!r} beside its stacks, which is not sharded over ep; use tp alone"
    (e, columns, d), f = gate_up.shape, down.shape[-1]
    if down.shape != (e, d, f) or columns != HALVES * f:
        shapes = f"{list(gate_up.shape)} and {list(down.shape)}"
        return f"has stacks {shapes}, not [e, 2f, d] and [e, d, f]; use tp alone"
    if e % ep:
        return f"has {e} experts, which ep does not divide; use an ep that does"
    if activation not in SILU:
        return f"has the activation {activation}, and experts over ep are gated by silu; use tp alone"
    if tuple(inspect.signature(module.forward).parameters) != ARGUMENTS:
        return f"is not called with {', '.join(ARGUMENTS)}; use tp alone"
    return None


def _tie(name: str, tied: set[str]) -> str | None:
    shared = [leaf for leaf in STACKS if f"{name}.{leaf}" in tied]
    return f"shares {shared[0]!r} with another module; untie it, or use tp alone" if shared else None
