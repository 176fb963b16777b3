"""Exchange tokens sharded over cp (with all columns) for columns sharded over cp (with all tokens), and back.

Rows are received in rank order, `rank-major`: the rows of rank 0, then the rows of rank 1, ...
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import large_tensors
from torch_impl.collectives.plain import all_to_all_equal
from torch_impl.contract import Group, Rejected, ShardedAny, contract
from torch_impl.layouts import (
    TokenLayout,
    _deinterleave_packed_seqs,
    _redo_attention_load_balancing,
    _reinterleave_packed_seqs,
    _undo_attention_load_balancing,
)


class _AllToAll(torch.autograd.Function):
    """`_all_to_all`, for `.apply`: same value and gradient.

        input_  "n/group ..."   ->   "n/group ..."

    Cost:   as `_all_to_all`.
    Errors: as `_all_to_all`.
    """

    @staticmethod
    @contract
    def forward(ctx: Any, input_: ShardedAny[Tensor, "..."], group: Group[ProcessGroup, "group"]) -> Tensor:
        if not input_.ndim or len(input_) % group.size():
            shape = list(input_.shape)
            raise Rejected(f"input_ is {shape}; cp={group.size()} ranks share dim 0 equally")
        ctx.group = group
        return all_to_all_equal(input_, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        # Call `apply`, so that the gradient can be differentiated again.
        return _AllToAll.apply(grad_output, ctx.group), None


# all_to_all: V -> V
def _all_to_all(input_: Shaped[Tensor, "*a"], group: ProcessGroup) -> Shaped[Tensor, "*a"]:
    """Send block j of dim 0 to rank j, and return the received blocks in rank order.

        input_  "n/group ..."   ->   "n/group ..."

        [a0, a1]        [a0, b0]
        [b0, b1]   =>   [a1, b1]

    The exchange is its own inverse and its own backward, so it can be differentiated any number of times. Any dtype and
    strides.

    Cost:   1 all_to_all of input_ forward, 1 backward; none in a group of one. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError if its ranks cannot share dim 0 equally.
    """
    return _AllToAll.apply(input_, group)


@contract
def _all_to_all_cp2hp(
    input_: ShardedAny[Tensor, "..."], cp_group: Group[ProcessGroup, "cp"], batch_size: int
) -> Shaped[Tensor, "*b"]:
    """Exchange tokens sharded over cp for columns sharded over cp.

        input_  "b s/cp w"   ->   "b s w/cp"        or  "t/cp w"   ->   "t w/cp",  rows rank-major

        [0 1 2 3]            [0 1]        [2 3]
        [4 5 6 7]   =>       [4 5]        [6 7]

    All ranks have the same number of tokens.

    Cost:   1 all_to_all of input_ forward, 1 backward, none in a group of one; two copies. Saves nothing.
    Errors: TypeError if cp_group is not a ProcessGroup; ValueError for other dims, a batch_size that differs from a 3-D
            input's, or a number of columns that cp does not divide.
    """
    if problem := _shape_problem(input_, batch_size) or _sharing_problem(input_.shape[-1], "columns", cp_group):
        raise Rejected(f"input_ {problem}")
    return _columns_for_tokens(input_, cp_group)


@contract
def _all_to_all_hp2cp(
    input_: ShardedAny[Tensor, "..."], cp_group: Group[ProcessGroup, "cp"], batch_size: int
) -> Shaped[Tensor, "*b"]:
    """Exchange columns sharded over cp for tokens sharded over cp: inverse and backward of `_all_to_all_cp2hp`.

        input_  "b s w/cp"   ->   "b s/cp w"        or  "t w/cp"   ->   "t/cp w",  rows rank-major

    Cost:   as `_all_to_all_cp2hp`.
    Errors: as `_all_to_all_cp2hp`, for rows instead of columns.
    """
    if problem := _shape_problem(input_, batch_size) or _sharing_problem(input_.shape[-2], "rows", cp_group):
        raise Rejected(f"input_ {problem}")
    return _tokens_for_columns(input_, cp_group)


def _shape_problem(x: Tensor, batch_size: int) -> str | None:
    """Why a tensor is neither a batch of this size nor a stream, or None."""
    if x.ndim not in (2, 3):
        return f"is {list(x.shape)}; it is [b, s, w] or [t, w]"
    if x.ndim == 3 and len(x) != batch_size:
        return f"is {list(x.shape)}, batch_size={batch_size}; pass batch_size={len(x)}"
    return None


def _sharing_problem(size: int, what: str, group: ProcessGroup) -> str | None:
    """Why ranks cannot share rows or columns equally, or None."""
    world = group.size()
    return f"has {size} {what}, which cp={world} ranks cannot share equally" if size % world else None


def _columns_for_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    # The exchange runs along dim 0: put one block of columns per rank there; it returns one block of tokens per rank.
    world = group.size()
    blocks = x.unflatten(-1, (world, x.shape[-1] // world)).movedim(-2, 0)  # n b s w
    return _all_to_all(blocks, group).movedim(0, -3).flatten(-3, -2)


def _tokens_for_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    world = group.size()
    blocks = x.unflatten(-2, (world, x.shape[-2] // world)).movedim(-3, 0)  # n b s w
    return _all_to_all(blocks, group).movedim(0, -2).flatten(-2, -1)


# The readable form of the exchanges of `MambaContextParallel`: it exchanges z, x, B, C and dt one by one. Its results
# equal those from the fused exchange to the bit.


def reference_all_to_all_cp2hp(
    parts: tuple[Shaped[Tensor, "b s _"], ...], cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup
) -> Shaped[Tensor, "b t v"]:
    """All tokens, in order, with this rank's columns of each part."""
    return torch.cat([_part_cp2hp(part, cu_seqlens, tokens, group) for part in parts], -1)


def _part_cp2hp(part: Tensor, cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup) -> Tensor:
    # A stream: rank-major -> sequence-major -> sequential inside each sequence.
    if tokens.kind == "packed" and cu_seqlens is not None:
        rank_major = _columns_for_tokens(part[0], group)
        sequence_major = _deinterleave_packed_seqs(rank_major, cu_seqlens // tokens.cp_size, tokens.cp_size)
        return _undo_attention_load_balancing(sequence_major, tokens.cp_size, cu_seqlens)[None]
    # Rows: each is one sequence.
    rank_major = _columns_for_tokens(part, group)
    if tokens.kind == "dual_chunk_swap":
        return _undo_attention_load_balancing(rank_major, tokens.cp_size)
    return large_tensors.index_select(rank_major, tokens.inverse.to(part.device), 1)


def reference_all_to_all_hp2cp(
    x: Shaped[Tensor, "b t i"], cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup
) -> Shaped[Tensor, "b s j"]:
    """This rank's tokens with all columns, from all tokens, in order, with this rank's columns."""
    if tokens.kind == "packed" and cu_seqlens is not None:
        sequence_major = _redo_attention_load_balancing(x[0], tokens.cp_size, cu_seqlens)
        rank_major = _reinterleave_packed_seqs(sequence_major, cu_seqlens // tokens.cp_size, tokens.cp_size)
        return _tokens_for_columns(rank_major, group)[None]
    if tokens.kind == "dual_chunk_swap":
        rank_major = _redo_attention_load_balancing(x, tokens.cp_size)
    else:
        rank_major = large_tensors.index_select(x, tokens.index.flatten().to(x.device), 1)
    return _tokens_for_columns(rank_major, group)
