"""Change the gradient type of a tensor without a forward collective: `reinterpret` and `convert`.

A tensor has one of four types over a group: R replicated, I invariant, V varying, P partial. `convert` keeps the full
value that the ranks' tensors represent; `reinterpret` keeps the tensor of each rank. Most changes need no communication
in either direction, and some not even a call; the manual has them in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives.gathers import own_shard
from torch_impl.collectives.lengths import dim_from_front, lengths_to_gather, lengths_to_scatter
from torch_impl.collectives.reductions import as_replicated
from torch_impl.contract import Group, Rejected, ShardedNumber, contract

LocalType = Literal["R", "I", "V", "P"]
# The other changes of a type take a collective in forward.
BY_COLLECTIVE = {
    "V -> R": "all_gather(x, group, out='R')",
    "V -> I": "all_gather(x, group, out='I')",
    "P -> R": "all_reduce(x, group, out='R')",
    "P -> I": "all_reduce(x, group, out='I')",
    "P -> V": "reduce_scatter(x, group)",
}


# reinterpret: the tensor of each rank stays
@contract
def reinterpret(
    x: ShardedNumber[Tensor, "..."], group: Group[ProcessGroup, "axis"], *, src: LocalType, dst: LocalType
) -> ShardedNumber[Tensor, "..."]:
    """Each rank's tensor, unchanged, with another gradient type. The full value of the ranks' tensors may change.

        I -> R        V -> P
        A      A      Ax     +Ax
        A  =>  A      Ay  => +Ay
        A      A      Az     +Az

    `src` is the type of x and `dst` that of the result.
    On a single device: I -> R and R -> I `return x`; R -> V and I -> V the ranks' copies, stacked; V -> P the sum of
    the ranks' tensors; R -> P and I -> P n times x, for n ranks.
    Backward: from I, the cotangents are addends, and the gradient is their sum. R -> I: the cotangent on rank 0 and
    zeros elsewhere, since the gradient of an R is a sum. Otherwise the cotangent.
    Megatron calls I -> R `copy_to_tensor_model_parallel_region`: the ranks use one value for their shares of work.

    Cost:   forward none: the result shares the memory of x; backward 1 all_reduce of x from I, bfloat16 and float16
            as float32, and none otherwise. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError for equal types and for a change by a collective.
    Source: the names follow meta-pytorch/spmd_types 0.3.1.
    """
    change = _change(src, dst)
    if src == "I":
        return as_replicated(x, group)
    return _as_invariant(x, group) if change == "R -> I" else _Same.apply(x)


# convert: the full value stays
@contract
def convert(
    x: ShardedNumber[Tensor, "..."],
    group: Group[ProcessGroup, "axis"],
    *,
    src: LocalType,
    dst: LocalType,
    dim: int = 0,
    lengths: Sequence[int] | None = None,
) -> ShardedNumber[Tensor, "..."]:
    """The same full value with another gradient type: a rank gets its shard, term, or tensor. Forward sends nothing.

        R, I -> V                    R, I -> P         V -> P
        [A0, A1, A2]     A0          A     +A          A0           +[A0, 0, 0]
        [A0, A1, A2] =>     A1       A  => +0             A1     => +[0, A1, 0]
        [A0, A1, A2]           A2    A     +0                A2     +[0, 0, A2]

    On a single device: `return x`, the identity.
    `src` is the type of x and `dst` that of the result. V is sharded along `dim`; `lengths` has the number of
    positions on each rank, 0 included, and without it all shards are equal.
    Backward: I -> R the sum of the cotangents; I -> V the cotangents, gathered; I -> P the cotangent; R -> I and
    R -> P the cotangent on rank 0 and zeros elsewhere; R -> V the cotangent, padded with zeros; V -> P this rank's
    shard of the cotangent.

    Cost:   forward none, and I -> R and R -> I share the memory of x; backward 1 all_reduce for I -> R, bfloat16 and
            float16 as float32, 1 all_gather of the longest shard for I -> V, and none otherwise. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError for a change that only a collective can make,
            for a dim that x lacks, and for lengths that do not fit the group or x or do not belong to the change.
    Source: the names follow meta-pytorch/spmd_types 0.3.1.
    """
    change = _change(src, dst)
    if "V" not in (src, dst):
        if dim != 0 or lengths is not None:
            name = "dim" if lengths is None else "lengths"
            raise Rejected(f"{name} is for a V, which is sharded; {change} changes no shape: leave it out")
        return _WHOLE[change](x, group)
    dim = dim_from_front("dim", dim, x)
    known = (lengths_to_gather if src == "V" else lengths_to_scatter)("lengths", lengths, x, dim, group)
    if src == "I":
        return own_shard(x, group, known, dim)
    return (_Padded if src == "V" else _Own).apply(x, group, dim, known)


def _change(src: str, dst: str) -> str:
    """The change as text, such as `I -> R`. Errors: ValueError for equal types, or if only a collective makes it."""
    change = f"{src} -> {dst}"
    if src == dst:
        raise Rejected(f"src={src!r} is dst already; use x itself")
    if change in BY_COLLECTIVE:
        raise Rejected(f"src={src!r}, dst={dst!r}: only a collective makes this change; write {BY_COLLECTIVE[change]}")
    return change


# Gradient types: R -> I.
def _as_invariant(x: Tensor, group: ProcessGroup) -> Tensor:
    """x with gradient type I. x itself if it does not require grad."""
    return _Whole.apply(x, group) if x.requires_grad else x


class _Same(torch.autograd.Function):
    """Return x, and its cotangent. A plain view would not do: its gradient may share the cotangent's memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


class _Term(torch.autograd.Function):
    """Keep x on rank 0 and return zeros elsewhere: the terms sum to x. R -> P, its own transpose, and I -> P."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, src: str) -> Tensor:
        ctx.group, ctx.src = group, src
        return x.clone(memory_format=torch.contiguous_format) if group.rank() == 0 else _zeros(x, x.shape)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.src == "R":
            return _Term.apply(cotangent, ctx.group, "R"), None, None
        return _as_invariant(cotangent, ctx.group), None, None


class _Whole(torch.autograd.Function):
    """R -> I, the transpose of I -> P."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _Term.apply(cotangent, ctx.group, "I"), None


class _Own(torch.autograd.Function):
    """This rank's shard of a replicated tensor: R -> V, the transpose of V -> P."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, lengths: list[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.lengths = group, dim, lengths
        return _own(x, group, dim, lengths).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _Padded.apply(cotangent, ctx.group, ctx.dim, ctx.lengths), None, None, None


class _Padded(torch.autograd.Function):
    """This rank's shard, with zeros in the place of the others: V -> P."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, lengths: list[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.lengths = group, dim, lengths
        padded = _zeros(x, (*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :]))
        _own(padded, group, dim, lengths).copy_(x)
        return padded

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _Own.apply(cotangent, ctx.group, ctx.dim, ctx.lengths), None, None, None


def _own(x: Tensor, group: ProcessGroup, dim: int, lengths: list[int]) -> Tensor:
    rank = group.rank()
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank])


def _zeros(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.zeros(shape, dtype=x.dtype, device=x.device)


_WHOLE: dict[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    "I -> R": as_replicated,
    "I -> P": lambda x, group: _Term.apply(x, group, "I"),
    "R -> I": _as_invariant,
    "R -> P": lambda x, group: _Term.apply(x, group, "R"),
}
