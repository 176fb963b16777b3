"""The style of a module that holds all experts in stacks [experts, out, in]: every expert is cut over tp.

A plan of transformers names the stacks beside their module; those entries are folded into the module's style.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from torch_impl.parallelizer.local_forward import LocalForward, as_addends, summed
from torch_impl.parallelizer.packed_styles import HALVES, halves

STACKED = 3  # dims of a stack: experts, rows, columns


def equal_parts(dim: int) -> Placement:
    """A dim cut over the ranks as it stands."""
    return Shard(dim)


# How an entry of a stack cuts it: along the rows of each expert's matrix, or along its columns.
CUTS: dict[str, tuple[Callable[[int], Placement], int]] = {
    "colwise": (equal_parts, -2),
    "rowwise": (equal_parts, -1),
    "packed_colwise": (halves, -2),
    "packed_rowwise": (halves, -1),
}


class Experts(LocalForward):
    """`moe_tp_experts`: each rank has its part of every expert, and the outputs are addends.

        hidden  "t d tp=I"   router weights  "t k tp=I"   stacks  cut as `stacks` says   ->   "t d tp=I"

    `stacks` gives the entry of each of the module's own parameters: colwise, rowwise, packed_colwise, packed_rowwise.

    Cost: forward 1 all_reduce of the output; backward 1 of each floating input's gradient.
    Errors: ValueError for a parameter without an entry, an entry without a parameter, a stack of another form.
    """

    def __init__(self, stacks: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.stacks = dict(stacks or {})

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        own = dict(module.named_parameters(recurse=False))
        missing, unknown = sorted(own.keys() - self.stacks.keys()), sorted(self.stacks.keys() - own.keys())
        if missing or unknown:
            kind = type(module).__name__
            wrong = f"parameter {missing[0]!r} has no entry" if missing else f"entry {unknown[0]!r} has no parameter"
            raise ValueError(f"moe_tp_experts: {wrong} in {kind}; give each of its stacks one of {', '.join(CUTS)}")
        return {name: self._cut(name, own[name]) for name in own}

    def _cut(self, name: str, parameter: Tensor) -> Placement:
        entry = self.stacks[name]
        if entry not in CUTS:
            raise ValueError(f"moe_tp_experts: entry {entry!r} of {name!r} is not one of {', '.join(CUTS)}")
        if parameter.ndim != STACKED:
            shape = list(parameter.shape)
            raise ValueError(f"moe_tp_experts: {name!r} is {shape}; only stacks [experts, out, in] can be cut")
        made, dim = CUTS[entry]
        if made is halves and parameter.shape[dim] % HALVES:
            raise ValueError(f"moe_tp_experts: {name!r} is {list(parameter.shape)}; {entry} needs two equal halves")
        return made(parameter.ndim + dim)

    def entered(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        def each(x: Any) -> Any:
            return as_addends(x, mesh) if isinstance(x, Tensor) and x.is_floating_point() else x

        return tuple(map(each, args)), {name: each(x) for name, x in kwargs.items()}

    def left(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        return summed(output, mesh)
