"""From tokens cut over cp, with all columns, to columns cut over cp, with all tokens; and back.

Rows arrive *rank-major*: those of rank 0, then those of rank 1, ...
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_group
from torch_impl.collectives.plain import exchanged
from torch_impl.kernels import rows_at
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

    Cost:   that of `_all_to_all`.
    Errors: those of `_all_to_all`.
    """

    @staticmethod
    def forward(ctx: Any, input_: Shaped[Tensor, "*a"], group: ProcessGroup) -> Shaped[Tensor, "*a"]:
        ctx.group = checked_group("mamba._AllToAll", "group", group)
        if not input_.ndim or len(input_) % group.size():
            shape = list(input_.shape)
            raise ValueError(f"mamba._AllToAll: input_ is {shape}; cp={group.size()} ranks share dim 0 equally")
        arrived = exchanged(input_, group)
        return arrived.view_as(arrived) if arrived is input_ else arrived

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad_output, ctx.group), None


# all_to_all: V -> V
def _all_to_all(input_: Shaped[Tensor, "*a"], group: ProcessGroup) -> Shaped[Tensor, "*a"]:
    """Block j of dim 0 to rank j; the blocks that arrive, in rank order.

        input_  "n/group ..."   ->   "n/group ..."

        [a0, a1]        [a0, b0]
        [b0, b1]   =>   [a1, b1]

    Its own inverse, and its own backward, as often as it is differentiated. Any dtype and strides.

    Cost:   1 all_to_all of input_ forward, 1 backward; none in a group of one. Saves nothing.
    Errors: TypeError if group is no ProcessGroup; ValueError if its ranks cannot share dim 0 equally.
    """
    return _AllToAll.apply(input_, group)


def _all_to_all_cp2hp(input_: Shaped[Tensor, "*a"], cp_group: ProcessGroup, batch_size: int) -> Shaped[Tensor, "*b"]:
    """Columns instead of tokens cut over cp.

        input_  "b s/cp w"   ->   "b s w/cp"        or  "t/cp w"   ->   "t w/cp",  rows rank-major

        [0 1 2 3]            [0 1]        [2 3]
        [4 5 6 7]   =>       [4 5]        [6 7]

    `batch_size` is that of a 3-D input. All ranks hold as many tokens.

    Cost:   1 all_to_all of input_ forward, 1 backward, none in a group of one; two copies. Saves nothing.
    Errors: TypeError if cp_group is no ProcessGroup; ValueError for other dims, another batch_size, or columns that
            the ranks cannot share equally.
    """
    world = _checked("_all_to_all_cp2hp", input_, cp_group, batch_size, dim=-1)
    blocks = input_.unflatten(-1, (world, input_.shape[-1] // world)).movedim(-2, 0)  # n b s w
    return _all_to_all(blocks, cp_group).movedim(0, -3).flatten(-3, -2)


def _all_to_all_hp2cp(input_: Shaped[Tensor, "*a"], cp_group: ProcessGroup, batch_size: int) -> Shaped[Tensor, "*b"]:
    """Tokens instead of columns cut over cp: the inverse of `_all_to_all_cp2hp`, and its backward.

        input_  "b s w/cp"   ->   "b s/cp w"        or  "t w/cp"   ->   "t/cp w",  rows rank-major

    Cost:   as there.
    Errors: as there, of rows instead of columns.
    """
    world = _checked("_all_to_all_hp2cp", input_, cp_group, batch_size, dim=-2)
    blocks = input_.unflatten(-2, (world, input_.shape[-2] // world)).movedim(-3, 0)  # n b s w
    return _all_to_all(blocks, cp_group).movedim(0, -2).flatten(-2, -1)


def _checked(function: str, x: Tensor, group: ProcessGroup, batch_size: int, dim: int) -> int:
    """The ranks that share `dim` of a stream or of a batch."""
    function = f"mamba.{function}"
    world = checked_group(function, "cp_group", group).size()
    if x.ndim not in (2, 3):
        raise ValueError(f"{function}: input_ is {list(x.shape)}; it is [b, s, w] or [t, w]")
    if x.ndim == 3 and len(x) != batch_size:
        raise ValueError(f"{function}: input_ is {list(x.shape)}, batch_size={batch_size}; pass batch_size={len(x)}")
    if x.shape[dim] % world:
        what = "columns" if dim == -1 else "rows"
        raise ValueError(f"{function}: input_ has {x.shape[dim]} {what}, which cp={world} ranks cannot share equally")
    return world


def sequential(
    parts: tuple[Shaped[Tensor, "b s _"], ...], cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup
) -> Shaped[Tensor, "b t v"]:
    """All tokens, in order, of this rank's columns of each part."""
    return torch.cat([_one(part, cu_seqlens, tokens, group) for part in parts], -1)


def _one(part: Tensor, cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup) -> Tensor:
    if tokens.kind == "packed" and cu_seqlens is not None:
        arrived = _all_to_all_cp2hp(part[0], group, 1)
        majored = _deinterleave_packed_seqs(arrived, cu_seqlens // tokens.cp_size, tokens.cp_size)
        return _undo_attention_load_balancing(majored, tokens.cp_size, cu_seqlens)[None]
    arrived = _all_to_all_cp2hp(part, group, len(part))
    if tokens.kind == "dual_chunk_swap":
        return _undo_attention_load_balancing(arrived, tokens.cp_size)
    return rows_at(arrived, tokens.inverse.to(part.device), 1)


def own_tokens(
    x: Shaped[Tensor, "b t i"], cu_seqlens: Tensor | None, tokens: TokenLayout, group: ProcessGroup
) -> Shaped[Tensor, "b s j"]:
    """This rank's tokens of all columns, of all tokens of its columns in order."""
    if tokens.kind == "packed" and cu_seqlens is not None:
        majored = _redo_attention_load_balancing(x[0], tokens.cp_size, cu_seqlens)
        rows = _reinterleave_packed_seqs(majored, cu_seqlens // tokens.cp_size, tokens.cp_size)
        return _all_to_all_hp2cp(rows, group, 1)[None]
    if tokens.kind == "dual_chunk_swap":
        rows = _redo_attention_load_balancing(x, tokens.cp_size)
    else:
        rows = rows_at(x, tokens.index.flatten().to(x.device), 1)
    return _all_to_all_hp2cp(rows, group, len(x))
