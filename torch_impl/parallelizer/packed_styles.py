"""Styles of linear layers that hold a gate and an up projection in one weight: each half is cut on its own.

The parameter is a DTensor whose full value has the original order of rows, which state dicts and checkpoints show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from torch_impl.parallelizer._torch_compat import halved
from torch_impl.parallelizer.local_forward import LocalForward, as_addends, summed

HALVES = 2


def halves(dim: int) -> Placement:
    """Both halves of a dim cut over the ranks; a rank's parts of the two stand one after the other."""
    return halved(dim, HALVES)


def is_halved(placement: Placement) -> bool:
    """Whether a placement is one of `halves`."""
    return type(placement) is type(halves(0))


class PackedColwise(LocalForward):
    """`packed_colwise`: the gate and up columns that this rank has of both.

        input  "... d tp=I"   weight  "o d", "o" = gate | up, each /tp   ->   "... o", each half /tp

    Cost: backward 1 all_reduce of the input's gradient.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: halves(0) for name in linear_parameters("packed_colwise", module, "out_features")}

    def entered(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        x, *others = args
        return (as_addends(x, mesh), *others), kwargs


class PackedRowwise(LocalForward):
    """`packed_rowwise`: the input is this rank's part of each half, the output is whole, the bias added once.

        input  "... i", each half /tp   weight  "o i", likewise   ->   "... o tp=I"

    Cost: forward 1 all_reduce of the output.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        names = linear_parameters("packed_rowwise", module, "in_features")
        return {name: Replicate() if name == "bias" else halves(1) for name in names}

    def local(self, name: str, parameter: DTensor) -> Tensor | None:
        return None if name == "bias" else parameter.to_local()

    def left(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        whole, bias = summed(output, mesh), module._parameters.get("bias")
        return whole + bias.to_local() if isinstance(bias, DTensor) else whole


def linear_parameters(style: str, module: nn.Module, width: str) -> list[str]:
    """Names of a linear layer's parameters. Errors: ValueError for another module, or a width without halves."""
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{style}: cuts the halves of a Linear, not a {type(module).__name__}")
    if getattr(module, width) % HALVES:
        raise ValueError(f"{style}: {width}={getattr(module, width)} has no two equal halves")
    return [name for name, _ in module.named_parameters()]
