"""The token layout of a batch, from the name of an order or from a TokenLayout, and its offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import Rejected, TypeProblem, type_name
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.divisibility import check_offset_tensor
from torch_impl.layouts.token_layout import dense_layout, stream_layout

PACKED = {"contiguous": "contiguous", "dual_chunk_swap": "packed"}  # order -> the layout kind of a packed stream


@dataclass(frozen=True)
class _OrderKind:
    """The name of a token order, or a TokenLayout for every batch."""

    def problem(self, value: Any) -> str | None:
        choice = "contiguous, dual_chunk_swap or a TokenLayout"
        if not isinstance(value, (str, TokenLayout)):
            return TypeProblem(f" is {type_name(value)}; pass {choice}")
        return f"={value!r} is not {choice}" if isinstance(value, str) and value not in PACKED else None


Order = Annotated[str | TokenLayout, _OrderKind()]


def batch_layout(
    order: str | TokenLayout, total: int, cu_seqlens: Tensor | None, group: ProcessGroup, device: torch.device
) -> TokenLayout:
    """The layout of a batch with `total` tokens in each row, or in its stream.

    Cost:   one host read of the offsets.
    Errors: ValueError for a layout with other tokens, sequences or ranks, or with unequal shards; for offsets that
            do not rise from 0 to the number of tokens.
    """
    # 1. A TokenLayout must match this group and these tokens.
    if isinstance(order, TokenLayout):
        problem = _rank_problem(order, group) or _token_problem(order, total) or _sequence_problem(order, cu_seqlens)
        if problem:
            raise Rejected(problem)
        return order
    # 2. With the name of an order: each row is one sequence, or the tokens are a packed stream.
    if cu_seqlens is None:
        return dense_layout(order, total, group.size(), group.rank(), device)
    return stream_layout(PACKED[order], cu_seqlens, total, group.size(), group.rank())


def shard_layout(
    order: str | TokenLayout, name: str, x: Tensor, cu_seqlens: Tensor | None, group: ProcessGroup
) -> TokenLayout:
    """The layout of a batch, given this rank's shard x, `[b, s, ...]`. Shards may be ragged.

    Cost, errors: as `batch_layout`; ValueError for several rows with offsets.
    """
    rows = x.shape[1]
    if len(x) != 1 and cu_seqlens is not None:
        raise Rejected(f"{name} is {list(x.shape)} with cu_seqlens; a packed stream is one row, [1, t, ...]")
    if cu_seqlens is not None:
        check_offset_tensor("cu_seqlens", cu_seqlens)
    if not isinstance(order, TokenLayout) or order.kind != "ragged":
        return batch_layout(order, rows * group.size(), cu_seqlens, group, x.device)
    problem = _rank_problem(order, group)
    if not problem and order.counts[order.cp_rank] != rows:
        held = f"layout gives rank {order.cp_rank} {order.counts[order.cp_rank]} tokens"
        problem = f"{held}, but {name} has {rows}; pass the layout of this batch"
    if problem := problem or _sequence_problem(order, cu_seqlens):
        raise Rejected(problem)
    return order


def _rank_problem(layout: TokenLayout, group: ProcessGroup) -> str | None:
    """Why a layout is not for this rank of the group; None if it is."""
    size, rank = group.size(), group.rank()
    if (layout.cp_size, layout.cp_rank) == (size, rank):
        return None
    of_layout = f"layout is for cp={layout.cp_size} and rank {layout.cp_rank}"
    return f"{of_layout}, cp_group has cp={size} and rank {rank}; rebind it"


def _token_problem(layout: TokenLayout, total: int) -> str | None:
    """Why a layout does not match `total` tokens, or is not supported; None if it is valid."""
    if layout.total != total:
        return f"layout has {layout.total} tokens, the ranks have {total}"
    # A state can be passed on to one sequence only.
    if layout.prefix_of:
        return "layout has sequences that continue others (prefix_of), which attention alone supports"
    # The collectives exchange blocks of one size.
    if len(set(layout.counts)) > 1:
        return f"layout gives the ranks {layout.counts} tokens; they must be equal"
    return None


def _sequence_problem(layout: TokenLayout, cu_seqlens: Tensor | None) -> str | None:
    """Why offsets, without negative entries at the end, differ from the layout's; None if they are equal."""
    if cu_seqlens is None:
        return None
    offsets, of_layout = [x for x in cu_seqlens.tolist() if x >= 0], layout.cu_padded.tolist()
    if offsets == of_layout:
        return None
    if len(offsets) != len(of_layout):
        difference = f"cu_seqlens has {len(offsets) - 1} sequences, layout {len(of_layout) - 1}"
    else:
        j = next(j for j, pair in enumerate(zip(offsets, of_layout, strict=True)) if pair[0] != pair[1])
        difference = f"cu_seqlens[{j}] is {offsets[j]}, {of_layout[j]} in layout"
    return f"{difference}; pass the layout of this batch, or its offsets alone"
