"""Logits at k ids of each token, read without their softmax, and the ids of the positions that a cp rank holds.

Nothing of the logits' size is kept: the gradient is zero but at the ids.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import summed
from torch_impl.vocab_parallel.rows import block_rows, row_blocks
from torch_impl.vocab_parallel.sequence_gather import (
    _get_tokens_on_this_cp_rank,
    check_cut_over_cp,
    checked_cp_group,
)
from torch_impl.vocab_parallel.statistics import local_column
from torch_impl.vocab_parallel.vocab_range import NO_ID


class LogitsAt(torch.autograd.Function):
    """z[idx_j], 0 where nobody owns the id: "*a v/tp", "*a k" -> "*a k tp=I". `group` None is for whole rows.

    Forward 1 all_reduce of the k numbers of each row, backward none. Saves 4 bytes of each id.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "*a v"],
        ids: Int[Tensor, "*a k"],
        start: int,
        end: int,
        group: ProcessGroup | None,
        chunk_size: int | None,
    ) -> Float[Tensor, "*a k"]:
        column = local_column(ids, start, end)
        ctx.like, ctx.chunk_size = (logits.shape, logits.dtype), chunk_size
        ctx.save_for_backward(column)
        found = torch.zeros(column.shape, dtype=accumulator(logits.dtype), device=logits.device)
        if logits.shape[-1]:
            looked_up = logits.gather(-1, column.clamp_min(0).long())
            found = torch.where(column >= 0, looked_up.to(found.dtype), found)
        return found if group is None else summed(found, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (column,), (shape, dtype) = ctx.saved_tensors, ctx.like
        rows = column.shape[:-1].numel(), column.shape[-1]
        g = torch.where(column >= 0, cotangent, 0.0).reshape(rows)
        here = column.clamp_min(0).long().reshape(rows)
        gradient = torch.empty(shape, dtype=dtype, device=cotangent.device)
        for part, block in row_blocks(gradient, block_rows(gradient, ctx.chunk_size)):
            if block.shape[-1]:
                added = torch.zeros(block.shape, dtype=g.dtype, device=g.device).scatter_add_(-1, here[part], g[part])
                block.copy_(added)
        return gradient, None, None, None, None, None


def check_positions(
    function: str, ids_name: str, ids: Tensor, logits_name: str, logits: Tensor, cp_group: ProcessGroup | None
) -> int:
    """The number of cp ranks, whose logits cover the positions of ids [b, s, k] and can be cut."""
    cp = 1 if cp_group is None else checked_cp_group(function, cp_group).size()
    if logits.ndim != 3 or ids.ndim != 3 or len(ids) != len(logits):
        raise ValueError(
            f"{function}: {ids_name} is {list(ids.shape)} but {logits_name} is {list(logits.shape)}; "
            "they must be [b, s, k] and [b, s, v]"
        )
    local = logits.shape[1]
    if ids.shape[1] > local * cp:
        per_rank = f" ({local} per rank, cp={cp})" if cp > 1 else ""
        raise ValueError(
            f"{function}: {ids_name} has {ids.shape[1]} positions but {logits_name} covers {local * cp}{per_rank}"
        )
    check_cut_over_cp(function, local * cp, cp)
    return cp


def ids_held(
    ids: Int[Tensor, "b s k"], local: int, cp_group: ProcessGroup | None, positions: int | None = None
) -> Int[Tensor, "b l k"]:
    """The ids at this cp rank's `local` positions; nobody's at positions past the first `positions` (None: all)."""
    cp, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    asked = ids[:, : ids.shape[1] if positions is None else positions]
    padded = F.pad(asked, (0, 0, 0, local * cp - asked.shape[1]), value=NO_ID)
    return _get_tokens_on_this_cp_rank(padded, rank, cp)
