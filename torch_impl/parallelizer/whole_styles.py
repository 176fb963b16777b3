"""Styles of modules that have all of their parameters on each tp rank, and of outputs that are addends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from torch_impl.parallelizer.local_forward import LocalForward, summed


class Whole(LocalForward):
    """`replicate`: the module sees the same input on each rank.

        input  "... tp=I"   parameters  "... tp=I"   ->   "... tp=I"

    Cost: none.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: Replicate() for name, _ in module.named_parameters()}


class WholeSeenInParts(Whole):
    """`replicated_with_grad_allreduce`: the module sees this rank's part of the input, as a norm of its own heads.

        input  "... h/tp ..."   parameters  "... tp=R"   ->   "... h/tp ..."

    A rank's gradient is an addend. It is summed in autograd, before it is added to what `.grad` holds, so any number
    of backwards may be accumulated.

    Cost: backward 1 all_reduce of each parameter for each forward that used it.
    """

    def local(self, name: str, parameter: DTensor) -> Tensor:
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class Summed(LocalForward):
    """`all_reduce`: the module's outputs are addends.

        output  "... tp=P"   ->   "... tp=I"

    Cost: forward 1 all_reduce of the output.
    """

    def left(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        return summed(output, mesh)


class Divided(LocalForward):
    """`moe_identity_expert`: every rank passes the whole input, and a sum over the ranks stands after it.

        input  "... tp=I"   ->   "... tp=P"

    Cost: none.
    """

    def entered(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        x, *others = args
        return (x / mesh.size(), *others), kwargs
