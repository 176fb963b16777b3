"""The tokens that follow each token inside its document, over any layout; no rank ever holds the full sequence.

A rank has most of the tokens that follow its own. It receives the others, at most `depth` for each run of consecutive
tokens that it holds, from the ranks that have them. The layout tells every rank which tokens these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import large_tensors
from torch_impl.collectives.exchanges import exchange_rows
from torch_impl.contract import Group, Instance, PositiveInt, Rejected, ShardedAny, contract
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.fill import fill_of

OneLayout = Annotated[TokenLayout, Instance(TokenLayout, "pass a TokenLayout", shows_value=False)]


@contract
def tokens_ahead(
    tensor: ShardedAny[Tensor, "b t/cp:LAYOUT ..."],
    layout: OneLayout,
    cp_group: Group[ProcessGroup, "cp"],
    depth: PositiveInt,
    fill_value: float | int = 0,
) -> ShardedAny[Tensor, "k b t/cp:LAYOUT ..."]:
    """The values 1 to `depth` tokens after each token of `tensor`, where a token follows in the same document.

        out[k - 1, b, t] = tensor[b, t + k]    if token t + k is a real token of the document of t
                           fill_value          otherwise

    `tensor` has this rank's tokens in the order of `layout`, in any dtype that torch fills and the backend sends; every
    row of the batch has the documents of the layout. Pass ids for the inputs of multi-token prediction, and the shifted
    targets with fill -100 for its targets. A document shorter than k gets fill alone, and so does padding. Ranks
    may have any number of tokens, also fewer than `depth`, or none. A sequence with a prefix is a document of its own.
    Backward: the reverse exchange; a value's gradient is the sum over its places in the output, in the tensor's dtype.

    Cost:   1 all_to_all of the rows that other ranks lack, forward and backward; none if no rank lacks a row. At most
            `depth` rows arrive for each run of consecutive tokens. The first call with a layout and depth searches all
            positions for each rank, and copies the counts to the host; the layout keeps them. Saves indices.
    Errors: TypeError for a layout, group or fill_value of another type; ValueError for a group of another size or rank
            than the layout's, a tensor without its rows, a depth below 1, and a fill_value that the dtype cannot
            represent, such as -100 in uint8.
    Source: arXiv 2412.19437, section 2.2 (multi-token prediction).
    """
    fill = fill_of(tensor, fill_value)
    if (cp_group.size(), cp_group.rank()) != (layout.cp_size, layout.cp_rank):
        of_layout = f"the layout is for cp={layout.cp_size} and rank {layout.cp_rank}"
        raise Rejected(f"cp_group has cp={cp_group.size()} and rank {cp_group.rank()}, {of_layout}; rebind it")
    if tensor.shape[1] != (rows := layout.counts[layout.cp_rank]):
        raise Rejected(f"tensor has {tensor.shape[1]} rows along dim 1 but the layout has {rows} local rows")
    # 1. Receive the rows that this rank lacks.
    plan = layout.cached(("tokens ahead", depth, tensor.device), lambda: _plan(layout.on(tensor.device), depth))
    known = [tensor]
    if plan.is_exchanged:
        missing = exchange_rows(
            large_tensors.index_select(tensor, plan.rows, 1).movedim(1, 0), cp_group, plan.sent, plan.received
        )
        known.append(missing.movedim(0, 1))
    # 2. Take each token's row from the known rows; the last row is the fill.
    known.append(tensor.new_full((len(tensor), 1, *tensor.shape[2:]), fill))
    ahead = large_tensors.index_select(torch.cat(known, 1), plan.ahead.flatten(), 1)
    return ahead.unflatten(1, plan.ahead.shape).movedim(1, 0).contiguous()


@dataclass(frozen=True)
class _Plan:
    """Rows that this rank sends, how many go to and come from each rank, and where each row of the output is found.

    `ahead` indexes this rank's rows, followed by the rows received and by one row of fill.
    """

    rows: Int64[Tensor, " m"]
    sent: list[int]
    received: list[int]
    ahead: Int64[Tensor, "k l"]
    is_exchanged: bool


def _plan(layout: TokenLayout, depth: int) -> _Plan:
    me, ranks, device = layout.cp_rank, layout.cp_size, layout.index.device
    # 1. The rank and the row of each position; a ragged row of the index ends in -1.
    rank, row = torch.nonzero(layout.index >= 0, as_tuple=True)
    position = layout.index[rank, row]
    owner, row_of = torch.empty_like(position), torch.empty_like(position)
    owner[position], row_of[position] = rank, row
    # 2. The rows that each rank lacks: [r, p] tells if rank r needs position p of another rank.
    following = _following(layout)
    lacks = torch.zeros(ranks, layout.total, dtype=torch.bool, device=device)
    for k in range(1, depth + 1):
        (p,) = torch.nonzero(following >= k, as_tuple=True)
        lacks[owner[p], p + k] = True
    lacks[owner, torch.arange(layout.total, device=device)] = False
    # 3. Rows leave and arrive by rank, and by position for each rank.
    to, leaving = torch.nonzero(lacks & (owner == me), as_tuple=True)
    source, arriving = torch.nonzero(_one_row_each(owner, ranks) & lacks[me], as_tuple=True)
    counts = torch.stack([torch.bincount(each, minlength=ranks) for each in (to, source)])
    sent, received = counts.tolist()
    # 4. The row of each token ahead.
    place = torch.where(owner == me, row_of, 0)
    own = layout.counts[me]
    place[arriving] = own + torch.arange(len(arriving), device=device)
    k = torch.arange(1, depth + 1, device=device)[:, None]
    local = layout.local_index
    is_there = following[local] >= k
    ahead = torch.where(is_there, place[torch.where(is_there, local + k, 0)], own + len(arriving))
    return _Plan(row_of[leaving], sent, received, ahead, bool(lacks.any()))


def _following(layout: TokenLayout) -> Int64[Tensor, " total"]:
    """The number of real tokens after each position in its document; negative or 0 where there are none."""
    end = layout.cu_padded[:-1].long() + layout.cu_real.diff()
    return end[layout.sequence_ids] - 1 - torch.arange(layout.total, device=layout.index.device)


def _one_row_each(owner: Int64[Tensor, " total"], ranks: int) -> Bool[Tensor, "n total"]:
    """Row r tells which positions rank r has."""
    return owner == torch.arange(ranks, device=owner.device)[:, None]
