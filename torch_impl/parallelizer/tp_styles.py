"""Tensor-parallel styles beyond torch's, and how any style cuts the parameters of its module.

A LocalForward's module computes on this rank's tensors, while its parameters are DTensors everywhere else: for the time
of a forward each parameter is hidden behind its local part; the optimizer, the checkpoint and FSDP see the DTensor.
What the module's input and output mean on the ranks is the style's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from torch_impl.parallelizer._torch_compat import halved


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


class Rowwise(RowwiseParallel):
    """`rowwise`: as in torch, but a local input is a part of the layer's `in_features`, whatever its own width.

        input  "... i/tp"   weight  "o i/tp"   bias  "o tp=I", added once   ->   "... o tp=I"

    torch takes the input for one of equal parts, and refuses the product where they are not.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        made = super()._apply(module, device_mesh)
        if isinstance(module, nn.Linear) and self.input_layouts == (Shard(-1),):
            module.register_forward_pre_hook(partial(_with_width, device_mesh), prepend=True)
        return made


def _with_width(mesh: DeviceMesh, module: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    if isinstance(x, DTensor):
        return args
    shape = torch.Size((*x.shape[:-1], module.in_features))
    stride = torch.empty(shape, device="meta").stride()
    cut = DTensor.from_local(x, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
    return (cut, *others)


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


def placements_of(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    """Placement over tp of each of the module's parameters that the style cuts or repeats, by name.

    A style that is neither torch's nor ours cuts nothing as far as is known.

    Errors: ValueError for a module that the style cannot cut.
    """
    if isinstance(style, LocalForward):
        return style.placements(module)
    names = [name for name, _ in module.named_parameters()]
    if isinstance(style, SequenceParallel):
        return {name: Replicate() for name in names}
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return {}
    if not isinstance(module, nn.Linear | nn.Embedding):
        kind = type(module).__name__
        raise ValueError(f"{type(style).__name__} cuts Linear and Embedding, not {kind}; choose another style")
    inner = next((name for name in names if "." in name), None)
    if inner is not None:
        kind = type(module).__name__
        raise ValueError(
            f"{type(style).__name__} cuts a layer's own parameters, and this {kind} has {inner!r} inside; "
            "put what is added beside the layer, or merge it"
        )
    is_linear = isinstance(module, nn.Linear)
    if isinstance(style, ColwiseParallel):
        return {name: Shard(0 if is_linear else 1) for name in names}
    return {name: Shard(1 if is_linear else 0) if name == "weight" else Replicate() for name in names}


def cut_dim(placement: Placement | None) -> tuple[int | None, int]:
    """The dim that a placement cuts, None of none, and into how many parts first, each of which is then cut alike."""
    if placement is not None and is_halved(placement):
        return placement.dim, HALVES  # pyright: ignore[reportAttributeAccessIssue]
    return (placement.dim, 1) if isinstance(placement, Shard) else (None, 1)
