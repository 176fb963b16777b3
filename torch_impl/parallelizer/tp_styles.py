"""Tensor-parallel styles beyond torch's, and the placements that any style gives its module's parameters.

A module with a LocalForward style computes on this rank's tensors, while its parameters are DTensors everywhere else:
during a forward each parameter is replaced by its local shard, but the optimizer, the checkpoint and FSDP see the
DTensor. The style defines the layout of the module's input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from torch_impl.parallelizer._torch_compat import local_parameter, register_first, strided_shard

HALVES = 2  # gate and up in one weight
STACK_DIMS = 3  # the dims of a stack of experts: experts, rows, columns


# ---- Modules that compute on local tensors


def sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The identity on a replicated x; the backward sums the ranks' partial gradients."""
    replicated = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    # tp=R -> tp=I backward: 1 all_reduce of the gradient
    return replicated.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum x over the ranks; the backward passes the gradient, which is equal on all ranks, through."""
    partial_sum = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Partial()], run_check=False)
    # tp=P -> tp=I forward: 1 all_reduce
    return partial_sum.redistribute(placements=[Replicate()]).to_local()


class LocalForward(ParallelStyle):
    """Base class of styles: placements of the parameters, and hooks before and after the forward."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """The placement over tp of each parameter of the module, by name. Errors: ValueError for an unfit module."""
        return {}

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor | None:
        """The tensor that the forward reads in place of a parameter."""
        return local_parameter(parameter)

    def before_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Map the module's arguments to the forward's."""
        return args, kwargs

    def after_forward(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        """Map the forward's output to the module's."""
        return output

    def local_sizes(self, parent: nn.Module, ranks: int) -> dict[str, int]:
        """Attributes of the parent module that hold sizes, with their values on one rank."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = self.placements(module)
        for name, placement in placements.items():
            owner, leaf = owner_of(module, name)
            parameter = owner.get_parameter(leaf)
            shard = distribute(parameter, device_mesh, [placement], self.src_data_rank)
            owner.register_parameter(leaf, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        names = tuple(placements)
        module.register_forward_pre_hook(partial(_hide_parameters, self, names, device_mesh), with_kwargs=True)
        # Call it after a forward that raises too, so that `module.weight` is the DTensor again.
        module.register_forward_hook(partial(_show_parameters, names), always_call=True)
        module.register_forward_hook(partial(_finish, self, device_mesh))
        return module


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that owns the parameter with a dotted name, and the last part of the name."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def distribute(parameter: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], source: int | None) -> DTensor:
    """Broadcast the source rank's parameter, then shard it locally: a scatter rejects uneven halves."""
    replicated = distribute_tensor(parameter.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=source)
    return distribute_tensor(replicated.to_local(), mesh, placements, src_data_rank=None)


def _hide_parameters(
    style: LocalForward, names: tuple[str, ...], mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    for name in names:
        owner, leaf = owner_of(module, name)
        parameter = owner._parameters[leaf]
        if isinstance(parameter, DTensor):
            # Python finds instance attributes before nn.Module looks for a parameter of the same name.
            vars(owner)[leaf] = style.local_parameter(name, parameter)
    return style.before_forward(module, mesh, args, kwargs)


def _show_parameters(names: tuple[str, ...], module: nn.Module, args: Any, output: Any) -> None:
    for name in names:
        owner, leaf = owner_of(module, name)
        vars(owner).pop(leaf, None)


def _finish(style: LocalForward, mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    return style.after_forward(module, mesh, output)


# ---- Replicated parameters, and outputs that are partial sums


class Replicated(LocalForward):
    """`replicate`: the module sees the same input on each rank.

        input  "... tp=I"   parameters  "... tp=I"   ->   "... tp=I"

    Cost: none.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: Replicate() for name, _ in module.named_parameters()}


class ReplicatedOnShards(Replicated):
    """`replicated_with_grad_allreduce`: the module sees this rank's part of the input, such as a norm of its heads.

        input  "... h/tp ..."   parameters  "... tp=R"   ->   "... h/tp ..."

    A rank's gradient is a partial sum. Autograd sums it over the ranks before adding it to `.grad`, so any number of
    backwards may be accumulated.

    Cost: backward 1 all_reduce of each parameter for each forward that used it.
    """

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class SummedOutput(LocalForward):
    """`all_reduce`: the module's outputs are partial sums.

        output  "... tp=P"   ->   "... tp=I"

    Cost: forward 1 all_reduce of the output.
    """

    def after_forward(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        return sum_over_ranks(output, mesh)


class DividedInput(LocalForward):
    """`moe_identity_expert`: every rank passes on the input divided by tp, and a sum over the ranks follows.

        input  "... tp=I"   ->   "... tp=P"

    Cost: none.
    """

    def before_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        x, *rest = args
        return (x / mesh.size(), *rest), kwargs


# ---- Sharded linear layers


class Rowwise(RowwiseParallel):
    """`rowwise`: torch's style, for a local input that may be an uneven shard of the layer's `in_features`.

        input  "... i/tp"   weight  "o i/tp"   bias  "o tp=I", added once   ->   "... o tp=I"

    torch assumes equal shards, and its product fails if they are not.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied = super()._apply(module, device_mesh)
        if isinstance(module, nn.Linear) and self.input_layouts == (Shard(-1),):
            register_first(module, partial(_with_full_width, device_mesh))
        return applied


def _with_full_width(mesh: DeviceMesh, module: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = args
    if isinstance(x, DTensor):
        return args
    # Without a shape DTensor multiplies the local width by the ranks, which is wrong for uneven shards.
    shape = torch.Size((*x.shape[:-1], module.in_features))
    stride = torch.empty(shape, device="meta").stride()
    return (DTensor.from_local(x, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride), *rest)


def shard_of_parts(dim: int, parts: int) -> Placement:
    """A placement that shards each of a dim's equal parts; a rank has its shards of them one after the other."""
    return strided_shard(dim, parts)


def shard_of_halves(dim: int) -> Placement:
    """A placement that shards both halves of a dim."""
    return shard_of_parts(dim, HALVES)


def is_shard_of_parts(placement: Placement) -> bool:
    """Whether a placement was made by `shard_of_parts`."""
    return type(placement) is type(shard_of_halves(0))


class PackedColwise(LocalForward):
    """`packed_colwise`: gate and up columns in one weight; this rank has its own columns of both.

        input  "... d tp=I"   weight  "o d", "o" = gate | up, each /tp   ->   "... o", each half /tp

    The DTensor's full value, as in state dicts and checkpoints, has the original order of rows.

    Cost: backward 1 all_reduce of the input's gradient.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: shard_of_halves(0) for name in _packed_parameters("packed_colwise", module, "out_features")}

    def before_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        x, *rest = args
        return (sum_gradient(x, mesh), *rest), kwargs


class PackedRowwise(LocalForward):
    """`packed_rowwise`: the input is this rank's part of each half, the output is full, the bias added once.

        input  "... i", each half /tp   weight  "o i", likewise   ->   "... o tp=I"

    Cost: forward 1 all_reduce of the output.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        names = _packed_parameters("packed_rowwise", module, "in_features")
        return {name: Replicate() if name == "bias" else shard_of_halves(1) for name in names}

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor | None:
        # The bias is added after the sum over ranks.
        return None if name == "bias" else super().local_parameter(name, parameter)

    def after_forward(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        full, bias = sum_over_ranks(output, mesh), module._parameters.get("bias")
        return full + bias.to_local() if isinstance(bias, DTensor) else full


def _packed_parameters(style: str, module: nn.Module, width: str) -> list[str]:
    """The names of a linear layer's parameters. Errors: ValueError unless it is an nn.Linear of even width."""
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{style}: shards the halves of a Linear, not a {type(module).__name__}")
    if getattr(module, width) % HALVES:
        raise ValueError(f"{style}: {width}={getattr(module, width)} has no two equal halves")
    return [name for name, _ in module.named_parameters()]


# ---- Experts in stacks [experts, out, in]: every expert is sharded over tp

# The placement and the dim for each entry of a stack: the rows of each expert's matrix, or its columns.
STACK_SHARDS: dict[str, tuple[Callable[..., Placement], int]] = {
    "colwise": (Shard, -2),
    "rowwise": (Shard, -1),
    "packed_colwise": (shard_of_halves, -2),
    "packed_rowwise": (shard_of_halves, -1),
}


class Experts(LocalForward):
    """`moe_tp_experts`: each rank has its shard of every expert, and the outputs are partial sums.

        hidden  "t d tp=I"   router weights  "t k tp=I"   stacks  sharded as `stacks` says   ->   "t d tp=I"

    `stacks` has an entry for each parameter of the module: colwise, rowwise, packed_colwise or packed_rowwise. A
    transformers plan has separate entries for the stacks, which are folded into this style.

    Cost: forward 1 all_reduce of the output; backward 1 of each floating input's gradient.
    Errors: ValueError for a parameter without an entry, an entry without a parameter, a stack of a wrong shape.
    """

    def __init__(self, stacks: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.stacks = dict(stacks or {})

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        parameters = dict(module.named_parameters(recurse=False))
        missing = sorted(parameters.keys() - self.stacks.keys())
        unknown = sorted(self.stacks.keys() - parameters.keys())
        if missing or unknown:
            kind, choices = type(module).__name__, ", ".join(STACK_SHARDS)
            wrong = f"parameter {missing[0]!r} has no entry" if missing else f"entry {unknown[0]!r} has no parameter"
            raise ValueError(f"moe_tp_experts: {wrong} in {kind}; give each of its stacks one of {choices}")
        return {name: self._placement(name, parameter) for name, parameter in parameters.items()}

    def _placement(self, name: str, parameter: Tensor) -> Placement:
        entry, shape = self.stacks[name], list(parameter.shape)
        if entry not in STACK_SHARDS:
            raise ValueError(f"moe_tp_experts: entry {entry!r} of {name!r} is not one of {', '.join(STACK_SHARDS)}")
        if parameter.ndim != STACK_DIMS:
            raise ValueError(f"moe_tp_experts: {name!r} is {shape}; only stacks [experts, out, in] can be sharded")
        shard, dim = STACK_SHARDS[entry]
        if shard is shard_of_halves and parameter.shape[dim] % HALVES:
            raise ValueError(f"moe_tp_experts: {name!r} is {shape}; {entry} needs two equal halves")
        return shard(parameter.ndim + dim)

    def before_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        def shared(x: Any) -> Any:
            # Integers, such as the ids of the chosen experts, have no gradient.
            return sum_gradient(x, mesh) if isinstance(x, Tensor) and x.is_floating_point() else x

        return tuple(map(shared, args)), {name: shared(x) for name, x in kwargs.items()}

    def after_forward(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        return sum_over_ranks(output, mesh)


# ---- Placements of any style


def placements_of(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    """The placement over tp that a style will give each parameter of the module, by name.

    The result is empty for a style that is neither torch's nor defined here.

    Errors: ValueError for a module that the style cannot shard.
    """
    if isinstance(style, LocalForward):
        return style.placements(module)
    names = [name for name, _ in module.named_parameters()]
    if isinstance(style, SequenceParallel):
        return {name: Replicate() for name in names}
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return {}
    kind = type(module).__name__
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(f"{type(style).__name__} shards Linear and Embedding, not {kind}; choose another style")
    inner = next((name for name in names if "." in name), None)
    if inner is not None:
        raise ValueError(
            f"{type(style).__name__} shards a layer's direct parameters, and this {kind} has {inner!r} inside; "
            "make an adapter with add_lora, or merge it"
        )
    is_linear = isinstance(module, nn.Linear)
    if isinstance(style, ColwiseParallel):
        return {name: Shard(0 if is_linear else 1) for name in names}
    return {name: Shard(1 if is_linear else 0) if name == "weight" else Replicate() for name in names}


def sharded_dim(placement: Placement | None) -> tuple[int | None, int]:
    """The dim that a placement shards, or None, and the number of equal parts that it shards separately."""
    if placement is not None and is_shard_of_parts(placement):
        return placement.dim, placement.split_factor  # pyright: ignore[reportAttributeAccessIssue]
    return (placement.dim, 1) if isinstance(placement, Shard) else (None, 1)
