"""The sequence cut over context-parallel ranks, and whole again.

Rank r of cp holds pieces r and 2 cp - 1 - r of 2 cp equal pieces of the sequence (DualChunkSwap). One rank
alone holds all of it, of any length.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_dim, checked_group
from torch_impl.collectives.plain import gathered, scattered_sum
from torch_impl.kernels import rows_at
from torch_impl.layouts import contiguous, dual_chunk_swap, uncuttable
from torch_impl.layouts.index_arrays import inverted


def _get_tokens_on_this_cp_rank(
    input_ids: Shaped[Tensor, "*a"], cp_rank: int, cp_size: int, seq_dim: int = 1
) -> Shaped[Tensor, "*b"]:
    """This rank's positions of a whole sequence, along `seq_dim`.

        input_ids  "b s cp=R"   ->   "b s/cp:dual_chunk_swap"

    Any dtype; differentiable. `cp_size=1` returns the same object.

    Cost:   no collective; one copy of the shard.
    Errors: ValueError if s is no multiple of 2 * cp_size, the rank is none of the ranks, or the tensor has
            no such dim.
    """
    function = "vocab_parallel._get_tokens_on_this_cp_rank"
    dim = checked_dim(function, "seq_dim", seq_dim, input_ids)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"{function}: cp_rank={cp_rank} is outside cp_size={cp_size}")
    check_cut_over_cp(function, input_ids.shape[dim], cp_size)
    if cp_size == 1:
        return input_ids
    return rows_at(input_ids, held(input_ids.shape[dim], cp_size, input_ids.device)[cp_rank], dim)


def allgather_cp_sharded_tensor(
    tensor: Shaped[Tensor, "*a"], cp_group: ProcessGroup, seq_dim: int = 1
) -> Shaped[Tensor, "*b"]:
    """The whole sequence from each rank's positions, in order along `seq_dim`.

        tensor  "b s/cp:dual_chunk_swap d"   ->   "b s d cp=R"

        A0 A3                [A0, A1, A2, A3]
               A1 A2    =>   [A0, A1, A2, A3]

    Any dtype, which is kept, and any strides. Cotangents are summed over cp: a loss repeated on each cp rank
    gives cp times the gradient; divide by cp or let each rank own a share.

    Cost:   forward 1 all_gather of the shard; backward 1 reduce_scatter of the whole, bfloat16 and float16
            as float32. Saves nothing.
    Errors: TypeError if cp_group is None or no ProcessGroup; ValueError for a dim that the tensor lacks, or an
            odd number of positions per rank over two ranks or more.
    """
    return AllGatherCPTensor.apply(tensor, cp_group, seq_dim)


class AllGatherCPTensor(torch.autograd.Function):
    """`allgather_cp_sharded_tensor`, for `.apply`: same value and gradient.

        tensor  "b s/cp:dual_chunk_swap d"   ->   "b s d cp=R"

    Cost:   that of `allgather_cp_sharded_tensor`.
    Errors: those of `allgather_cp_sharded_tensor`.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Shaped[Tensor, "*a"], cp_group: ProcessGroup, seq_dim: int = 1
    ) -> Shaped[Tensor, "*b"]:
        ctx.group = checked_cp_group("vocab_parallel.AllGatherCPTensor", cp_group)
        ctx.dim = checked_dim("vocab_parallel.AllGatherCPTensor", "seq_dim", seq_dim, tensor)
        local, cp = tensor.shape[ctx.dim], cp_group.size()
        if cp > 1 and local % 2:
            raise ValueError(
                f"vocab_parallel.AllGatherCPTensor: tensor has {local} positions per rank along seq_dim={seq_dim}; "
                f"dual_chunk_swap over cp={cp} needs an even number; pad s to {(local + 1) * cp}"
            )
        rank_major = gathered(tensor, cp_group, ctx.dim, [local] * cp)
        return rows_at(rank_major, inverted(torch.cat(held(local * cp, cp, tensor.device))), ctx.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        size, cp = grad_output.shape[ctx.dim], ctx.group.size()
        rank_major = rows_at(grad_output, torch.cat(held(size, cp, grad_output.device)), ctx.dim)
        return scattered_sum(rank_major, ctx.group, ctx.dim, [size // cp] * cp), None, None


def held(size: int, cp: int, device: torch.device) -> list[Int64[Tensor, " _"]]:
    """Global positions that each cp rank holds: DualChunkSwap's, which one rank alone does not need."""
    return dual_chunk_swap(size, cp, device=device) if cp > 1 else contiguous(size, 1, device=device)


def checked_cp_group(function: str, group: object) -> ProcessGroup:
    """`group` itself, a ProcessGroup."""
    return checked_group(function, "cp_group", group, " (a group of size 1 for no context parallelism)")


def check_cut_over_cp(function: str, size: int, cp: int) -> None:
    """A whole sequence of `size` positions can be cut over cp ranks."""
    reason = uncuttable("s", size, "cp", cp, "dual_chunk_swap") if cp > 1 else None
    if reason:
        raise ValueError(f"{function}: {reason}")
