"""Shard a model's experts over ep and tp: each rank has 1/tp of the columns of e/ep experts of a layer.

A transformers module of experts has all experts of a layer in two stacks (`expert_layouts`), and its arguments are
tokens, their expert ids and their gates. The module keeps its place and the names of its parameters, and the router
before it does not change; only the forward is replaced by `routed_experts`, which sends each token to the ranks of its
experts and back.

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
from torch.distributed.tensor import DTensor, Shard

from torch_impl.collectives import accumulator, all_gather
from torch_impl.collectives.gathers import own_shard
from torch_impl.expert_parallel import routed_experts
from torch_impl.parallelizer.expert_layouts import BIASES, LINEAR, STACKS, clamped_unit, layout_of
from torch_impl.parallelizer.mesh_axes import MeshAxes
from torch_impl.parallelizer.tp_styles import distribute


def shard_experts(modules: Mapping[str, nn.Module], axes: MeshAxes) -> None:
    """Shard the stacks over ep and tp, in place, and make each module send its tokens to the ranks of their experts.

        tokens "t/ep d tp=I", their expert ids and gates "t/ep k tp=I"   ->   "t/ep d tp=I"
        gate_up_proj "e 2f d"   ->   "e/ep 2f/tp d", each half /tp        down_proj "e d f"   ->   "e/ep d f/tp"
        of gpt-oss   "e d 2f"   ->   "e/ep d 2f/tp"                                 "e f d"   ->   "e/ep f/tp d"
        its biases     "e 2f"   ->   "e/ep 2f/tp"                                     "e d"   ->   "e/ep d tp=I"

    The parameters become DTensors over ep and tp, with the values of the mesh's first rank. Their gradients are 1/ep of
    the sum over all rows: FSDP also divides by the number of edp ranks, which makes it the mean over dp x cp x ep.

    Cost:   on construction 1 broadcast of each parameter over each axis, none on the meta device. Each forward has the
            collectives of `routed_experts` for this rank's part of the tokens; over tp also 1 all_gather of the outputs
            forward, and 1 of the tokens' and 1 of the gates' gradient backward. Biases are not sent.
    """
    mesh = axes.expert_mesh
    if mesh is None or axes.ep is None:
        return
    tp_group = None if axes.tp_mesh is None else axes.tp_mesh.get_group()
    ep_group = axes.mesh[axes.ep].get_group()
    for module in modules.values():
        layout = layout_of(module)
        for leaf in layout.dims:
            stack = module.get_parameter(leaf)
            on_tp = layout.placement(leaf)
            placements = [Shard(0) if name == axes.ep else on_tp for name in mesh.mesh_dim_names or ()]
            shard = distribute(stack, mesh, placements, source=0)
            module.register_parameter(leaf, nn.Parameter(shard, requires_grad=stack.requires_grad))
        # Set it on the instance: transformers chooses its implementation inside the class's forward.
        routed = partial(_routed, _linear_outputs if layout is LINEAR else _gpt_oss_outputs, module, ep_group, tp_group)
        module.forward = _called_with(layout.arguments, routed)


def fsdp_dims(module: nn.Module, ranks: int) -> dict[str, int]:
    """The dim of each parameter that FSDP shards over these ranks: the width if `ranks` divides it, else the experts.

    No other axis shards the width. So every rank stores equally much, however few experts an ep rank has, and the full
    tensor has only one possible order. FSDP shards only the first dim into unequal parts. A bias of columns has no
    width.
    """
    leaves = layout_of(module).dims.items()
    dims = {leaf: names.index("d") if "d" in names else 0 for leaf, names in leaves}
    return {leaf: 0 if module.get_parameter(leaf).shape[dim] % ranks else dim for leaf, dim in dims.items()}


# (module, tokens, gates, ids, ep group, tp group) -> the sums of the experts' outputs
Outputs = Callable[[nn.Module, Tensor, Tensor, Tensor, ProcessGroup, "ProcessGroup | None"], Tensor]


def _called_with(names: tuple[str, str, str], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function whose three arguments may also be passed by these names."""

    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])

    def call(*args: Tensor, **kwargs: Tensor) -> Tensor:
        return function(*signature.bind(*args, **kwargs).args)

    return call


def _routed(
    outputs: Outputs,
    module: nn.Module,
    ep_group: ProcessGroup,
    tp_group: ProcessGroup | None,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The forward of a module of experts: the sum of the experts' outputs for each of this rank's tokens."""
    gates = top_k_weights.to(accumulator(top_k_weights.dtype))  # the dtype of the weighted sum; often theirs already
    if tp_group is None:
        return outputs(module, hidden_states, gates, top_k_index, ep_group, None)
    lengths = _equal_parts(len(hidden_states), tp_group.size())
    x, gates, experts = (own_shard(x, tp_group, lengths) for x in (hidden_states, gates, top_k_index))
    y = outputs(module, x, gates, experts, ep_group, tp_group)
    return all_gather(y, tp_group, out="I", lengths=lengths)


def _linear_outputs(
    module: nn.Module, x: Tensor, gates: Tensor, experts: Tensor, ep: ProcessGroup, tp: ProcessGroup | None
) -> Tensor:
    gate_up, down = (_local_stack(module.get_parameter(leaf), ep.size()).transpose(1, 2) for leaf in STACKS)
    return routed_experts(x, gates, experts, gate_up, down, ep, tp)


def _gpt_oss_outputs(
    module: nn.Module, x: Tensor, gates: Tensor, experts: Tensor, ep: ProcessGroup, tp: ProcessGroup | None
) -> Tensor:
    gate_up, down, gate_up_bias, down_bias = (
        _local_stack(module.get_parameter(leaf), ep.size()) for leaf in (*STACKS, *BIASES)
    )
    return routed_experts(
        x,
        gates,
        experts,
        gate_up,
        down,
        ep,
        tp,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=clamped_unit(module),
    )


def _local_stack(stack: Tensor, ep: int) -> Tensor:
    """This rank's shard of a stack or a bias; its gradient is divided by the number of ep ranks.

    FSDP's `set_gradient_divide_factor` does not work here: torch 2.13 applies it twice if edp has one rank.
    """
    local = stack.to_local() if isinstance(stack, DTensor) else stack
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / ep)
    return local


def _equal_parts(size: int, parts: int) -> list[int]:
    return [size // parts + (part < size % parts) for part in range(parts)]
