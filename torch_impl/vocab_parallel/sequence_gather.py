"""Shard a sequence over context-parallel ranks, and gather it again.

Split the sequence into 2 cp equal chunks: cp rank r has chunks r and 2 cp - 1 - r (DualChunkSwap). A single rank has
the full sequence, of any length. The public functions validate; the package itself calls `cp_shard` and `GatherOverCp`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import large_tensors
from torch_impl.collectives.gathers import ReduceScatter
from torch_impl.collectives.plain import all_gather_concat
from torch_impl.contract import Group, NonNegativeInt, PositiveInt, Rejected, ShardedAny, contract
from torch_impl.layouts import contiguous, dual_chunk_swap, indivisible
from torch_impl.layouts.index_arrays import inverse_permutation


@contract
def _get_tokens_on_this_cp_rank(
    input_ids: ShardedAny[Tensor, "... s ... cp=R"], cp_rank: NonNegativeInt, cp_size: PositiveInt, seq_dim: int = 1
) -> ShardedAny[Tensor, "... s/cp:dual_chunk_swap ..."]:
    """This rank's positions of a full sequence along `seq_dim`, by DualChunkSwap.

    Any dtype; differentiable. `cp_size=1` returns the same object.

    Cost:   no collective; one copy of the shard.
    Errors: ValueError if s is not a multiple of 2 * cp_size, cp_rank is not below cp_size, or the tensor has no such
            dim.
    """
    reason = why_not_a_dim(input_ids, seq_dim)
    if reason is None and cp_rank >= cp_size:
        reason = f"cp_rank={cp_rank} is outside cp_size={cp_size}"
    if reason is None:
        reason = why_not_over_cp(input_ids.shape[seq_dim], cp_size)
    if reason:
        raise Rejected(reason)
    return cp_shard(input_ids, cp_rank, cp_size, seq_dim)


@contract
def allgather_cp_sharded_tensor(
    tensor: ShardedAny[Tensor, "... s/cp:dual_chunk_swap ..."], cp_group: Group[ProcessGroup, "cp"], seq_dim: int = 1
) -> ShardedAny[Tensor, "... s ... cp=R"]:
    """The full sequence from each rank's positions, in order along `seq_dim`.

        A0 A3                [A0, A1, A2, A3]
               A1 A2    =>   [A0, A1, A2, A3]

    The dtype may be any that the group's backend sends (gloo sends all but float8, int16 and unsigned dtypes wider than
    uint8), and the result keeps it. Any strides. Cotangents are summed over cp: a loss repeated on each cp rank gives
    cp times the gradient; divide by cp or use each score in the loss of one rank alone.

    Cost:   forward 1 all_gather of the shard; backward 1 reduce_scatter of the full sequence, bfloat16 and float16
            as float32. Saves nothing.
    Errors: TypeError if cp_group is not a ProcessGroup; ValueError if the tensor has no such dim, or for an odd number
            of positions per rank over two ranks or more.
    """
    reason = why_not_gathered(tensor, seq_dim, cp_group.size())
    if reason:
        raise Rejected(reason)
    return GatherOverCp.apply(tensor, cp_group, seq_dim)


class AllGatherCPTensor(torch.autograd.Function):
    """`allgather_cp_sharded_tensor` of `tensor`, for `.apply`: same value and gradient.

    Cost:   as `allgather_cp_sharded_tensor`.
    Errors: as `allgather_cp_sharded_tensor`.
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        tensor: ShardedAny[Tensor, "... s/cp:dual_chunk_swap ..."],
        cp_group: Group[ProcessGroup, "cp"],
        seq_dim: int = 1,
    ) -> ShardedAny[Tensor, "... s ... cp=R"]:
        reason = why_not_gathered(tensor, seq_dim, cp_group.size())
        if reason:
            raise Rejected(reason)
        return GatherOverCp.forward(ctx, tensor, cp_group, seq_dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return GatherOverCp.backward(ctx, grad_output)


class GatherOverCp(torch.autograd.Function):
    """`allgather_cp_sharded_tensor` for validated arguments."""

    @staticmethod
    def forward(ctx: Any, tensor: Shaped[Tensor, "*a"], group: ProcessGroup, dim: int) -> Shaped[Tensor, "*b"]:
        ctx.group, ctx.dim = group, dim % tensor.ndim
        local, cp = tensor.shape[ctx.dim], group.size()
        # 1. Gather the shards, in rank order.
        rank_major = all_gather_concat(tensor, group, ctx.dim, [local] * cp)
        # 2. Put the positions in the order of the sequence, by the inverse of the ranks' order.
        positions = torch.cat(positions_of_ranks(local * cp, cp, tensor.device))
        return large_tensors.index_select(rank_major, inverse_permutation(positions), ctx.dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        size, cp = grad_output.shape[ctx.dim], ctx.group.size()
        # The two steps in reverse. The result is replicated (R), so the gradient is the sum of all ranks' cotangents.
        positions = torch.cat(positions_of_ranks(size, cp, grad_output.device))
        rank_major = large_tensors.index_select(grad_output, positions, ctx.dim)
        return ReduceScatter.apply(rank_major, ctx.group, ctx.dim, [size // cp] * cp), None, None


def cp_shard(x: Shaped[Tensor, "*a"], rank: int, cp: int, dim: int = 1) -> Shaped[Tensor, "*b"]:
    """One rank's positions of x along `dim`; x itself if cp is 1."""
    # A single rank has every position in order, for any length.
    if cp == 1:
        return x
    return large_tensors.index_select(x, positions_of_ranks(x.shape[dim], cp, x.device)[rank], dim)


def positions_of_ranks(size: int, cp: int, device: torch.device) -> list[Int64[Tensor, " _"]]:
    """Global positions of each cp rank, by DualChunkSwap; a single rank takes any length."""
    return dual_chunk_swap(size, cp, device=device) if cp > 1 else contiguous(size, 1, device=device)


def rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, size) of a group; None is a group of one."""
    return (0, 1) if group is None else (group.rank(), group.size())


def why_not_over_cp(size: int, cp: int) -> str | None:
    """Why a sequence of `size` positions cannot be sharded over cp ranks, or None."""
    return indivisible("s", size, "cp", cp, "dual_chunk_swap") if cp > 1 else None


def why_not_covered(ids_name: str, positions: int, logits_name: str, local: int, cp: int) -> str | None:
    """Why ids with these `positions` do not fit logits with `local` positions on each of cp ranks, or None."""
    if positions > local * cp:
        per_rank = f" ({local} per rank, cp={cp})" if cp > 1 else ""
        return f"{ids_name} has {positions} positions but {logits_name} covers {local * cp}{per_rank}"
    return why_not_over_cp(local * cp, cp) if cp > 1 else None


def why_not_a_dim(x: Tensor, seq_dim: int) -> str | None:
    if not -x.ndim <= seq_dim < x.ndim:
        return f"seq_dim={seq_dim} is outside a tensor of {x.ndim} dims"
    return None


def why_not_gathered(x: Tensor, seq_dim: int, cp: int) -> str | None:
    # Each rank has two chunks of equal length.
    reason = why_not_a_dim(x, seq_dim)
    if reason is None and cp > 1 and x.shape[seq_dim] % 2:
        local = x.shape[seq_dim]
        reason = (
            f"tensor has {local} positions per rank along seq_dim={seq_dim}; "
            f"dual_chunk_swap over cp={cp} needs an even number; pad s to {(local + 1) * cp}"
        )
    return reason
