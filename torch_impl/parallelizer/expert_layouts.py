"""How modules of transformers store the experts of a layer.

Every such module has two stacks, `gate_up_proj` and `down_proj`. In most families these are [e, 2f, d], the gates
before the ups, and [e, d, f], with silu between them. gpt-oss has them transposed, its gates and ups alternate, each
stack has a bias, and its unit is clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torch_impl.expert_parallel import ClampedSwiGLU
from torch_impl.parallelizer.tp_styles import HALVES, STACK_DIMS, shard_of_halves

STACKS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True)
class ExpertLayout:
    """The dims of each parameter of a module of experts, and the arguments of its forward: tokens, ids and gates.

    The dims are e experts, d features of a token, which neither ep nor tp shards, f columns of an expert, and 2f
    columns of gate and up together.
    """

    dims: Mapping[str, tuple[str, ...]]
    arguments: tuple[str, str, str]
    gates_and_ups_alternate: bool  # else the gates are before the ups

    def placement(self, leaf: str) -> Placement:
        """The placement of a parameter over tp."""
        names = self.dims[leaf]
        if "f" in names:
            return Shard(names.index("f"))
        if "2f" not in names:
            return Replicate()  # the bias of d is added once, by `routed_experts`
        dim = names.index("2f")
        return Shard(dim) if self.gates_and_ups_alternate else shard_of_halves(dim)


LINEAR = ExpertLayout(
    dims={"gate_up_proj": ("e", "2f", "d"), "down_proj": ("e", "d", "f")},
    arguments=("hidden_states", "top_k_index", "top_k_weights"),
    gates_and_ups_alternate=False,
)
GPT_OSS = ExpertLayout(
    dims={
        "gate_up_proj": ("e", "d", "2f"),
        "gate_up_proj_bias": ("e", "2f"),
        "down_proj": ("e", "f", "d"),
        "down_proj_bias": ("e", "d"),
    },
    arguments=("hidden_states", "router_indices", "routing_weights"),
    gates_and_ups_alternate=True,
)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold all experts of a layer in the two stacks, by name."""
    return {name: module for name, module in model.named_modules() if all(_is_stack(module, leaf) for leaf in STACKS)}


def layout_of(module: nn.Module) -> ExpertLayout:
    """The layout of a module of experts: gpt-oss's if it has both biases and the unit's two numbers."""
    has_biases = all(isinstance(module._parameters.get(leaf), nn.Parameter) for leaf in BIASES)
    return GPT_OSS if has_biases and hasattr(module, "alpha") and hasattr(module, "limit") else LINEAR


def sizes_of(module: nn.Module, layout: ExpertLayout) -> dict[str, int]:
    """Dim name -> size, from the shape of `down_proj`."""
    sizes = dict(zip(layout.dims["down_proj"], module.get_parameter("down_proj").shape, strict=True))
    return {**sizes, "2f": HALVES * sizes["f"]}


def clamped_unit(module: Any) -> ClampedSwiGLU:
    """The unit of gpt-oss with the numbers of a module."""
    return ClampedSwiGLU(float(module.alpha), float(module.limit))


def _is_stack(module: nn.Module, leaf: str) -> bool:
    stack = module._parameters.get(leaf)
    return stack is not None and stack.ndim == STACK_DIMS
