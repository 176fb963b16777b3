"""Styles whose module computes on this rank's tensors, while its parameters are DTensors everywhere else.

For the time of a forward each parameter is hidden behind its local part; the optimizer, the checkpoint and FSDP see
the DTensor. What the module's input and output mean on the ranks is the style's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


def as_addends(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, whole and the same on each rank; the gradients that come back are addends, and their sum is passed on."""
    whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' x on each of them; the gradient that comes back is the same on each and passed on."""
    addend = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return addend.redistribute(placements=[Replicate()]).to_local()


class LocalForward(ParallelStyle):
    """What such styles share. A style says how parameters are cut and what happens around the forward."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Placement over tp of each parameter of the module, by its name. Errors: ValueError for another module."""
        return {}

    def local(self, name: str, parameter: DTensor) -> Tensor | None:
        """What the forward sees of a parameter."""
        return parameter.to_local()

    def entered(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments that the forward gets."""
        return args, kwargs

    def left(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        """The module's output, from the forward's."""
        return output

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = self.placements(module)
        for name, placement in placements.items():
            owner, leaf = owner_of(module, name)
            parameter = owner.get_parameter(leaf)
            cut = distributed(parameter, device_mesh, placement, self.src_data_rank)
            owner.register_parameter(leaf, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        names = tuple(placements)
        module.register_forward_pre_hook(partial(_enter, self, names, device_mesh), with_kwargs=True)
        module.register_forward_hook(partial(_uncover, names), always_call=True)
        module.register_forward_hook(partial(_leave, self, device_mesh))
        return module


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the parameter of a dotted name, and the parameter's own name."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def distributed(parameter: Tensor, mesh: DeviceMesh, placement: Placement, source: int | None) -> DTensor:
    """The parameter of the source rank, cut. Each rank cuts what was sent to all: a scatter refuses uneven halves."""
    whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=source)
    return distribute_tensor(whole.to_local(), mesh, [placement], src_data_rank=None)


def _enter(
    style: LocalForward, names: tuple[str, ...], mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    for name in names:
        owner, leaf = owner_of(module, name)
        parameter = owner._parameters[leaf]
        if isinstance(parameter, DTensor):
            vars(owner)[leaf] = style.local(name, parameter)  # found before the parameter of this name
    return style.entered(module, mesh, args, kwargs)


def _uncover(names: tuple[str, ...], module: nn.Module, args: Any, output: Any) -> None:
    for name in names:
        owner, leaf = owner_of(module, name)
        vars(owner).pop(leaf, None)


def _leave(style: LocalForward, mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    return style.left(module, mesh, output)
