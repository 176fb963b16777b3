"""The runs of tokens on a rank, cut into blocks, and the chain along which ranks pass on the states of runs.

A run is consecutive tokens of one sequence on one rank. Its final state is `transition @ entering + state`, where
`state` is the final state if nothing enters. Each rank sends `transition` and `state` of the runs that another rank
continues. Every rank then computes the states that enter its own runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import large_tensors
from torch_impl.collectives.plain import all_gather_stack
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.cache import has_numbers
from torch_impl.mamba.segments import Blocks, _blocks, _check_order, _halves, _order_of_halves


@dataclass(frozen=True)
class Chain:
    """The order in which states pass from run to run.

    `order` has a row for each sequence (a single row for a contiguous stream): the sent runs of all ranks, sorted by
    position. An entry `continues` the entry before it, or starts a sequence. `sent` and `received` are the local runs
    that send a state and that receive one. A received state follows `before` entries of its row; 0 means that no state
    enters. A sent run is at `position` of its row.
    """

    order: Int64[Tensor, "q m"]
    continues: Bool[Tensor, "q m"]
    sent: Int64[Tensor, " g"]
    received: Int64[Tensor, " g"]
    before: Int64[Tensor, "q e"]
    position: Int64[Tensor, "q e"]


@dataclass(frozen=True)
class Runs:
    """The runs of one rank; they depend on the layout alone.

    `is_first` marks the first block of each run, and `last` is its last block, or -1 for a run without tokens.
    `sequence` is the sequence of a run, and the run `begins` or `ends` it, or neither. A sequence without tokens begins
    and ends in one run of one rank.
    """

    blocks: Blocks
    is_first: Bool[Tensor, " m"]
    last: Int64[Tensor, " r"]
    sequence: Int64[Tensor, " r"]
    begins: Bool[Tensor, " r"]
    ends: Bool[Tensor, " r"]
    chain: Chain


def runs_of(layout: TokenLayout, chunk_size: int, device: torch.device) -> Runs:
    """The runs of a layout that has tokens, in blocks of at most `chunk_size` tokens; cached with the layout.

    Cost:   no collective; one host read per layout, of the number of blocks. No loop over sequences or ranks.
    Errors: ValueError for a layout that is neither contiguous, ragged nor dual_chunk_swap.
    """
    _check_order(layout)
    build = _runs_in_order if layout.is_identity else _runs_of_halves
    return layout.cached(("runs", chunk_size, device), lambda: build(layout.on(device), chunk_size))


def _runs_of_halves(layout: TokenLayout, chunk_size: int) -> Runs:
    """Both chunks of each sequence are runs, and all of them send and receive a state."""
    spans = _halves(layout)
    order, _, before = _order_of_halves(layout, spans)
    count, places = len(spans.starts), torch.arange(order.shape[1], device=order.device)
    every = torch.arange(count, device=order.device)
    chain = Chain(order, (places > 0).expand_as(order), every, every, before, before)
    at = before.flatten()
    return _in_blocks(layout, spans.starts, spans.stops, at == 0, at == len(places) - 1, every // 2, chain, chunk_size)


def _runs_in_order(layout: TokenLayout, chunk_size: int) -> Runs:
    """Each sequence is a run on every rank, mostly without tokens. A rank's last run sends, and its first receives."""
    n, rank, ids = layout.cp_size, layout.cp_rank, layout.sequence_ids
    cu, counts = layout.cu_padded.long(), torch.tensor(layout.counts, device=ids.device)
    ends = counts.cumsum(0)
    start, end = ends[rank] - counts[rank], ends[rank]
    # 1. The ranks of each sequence's first and last token. A sequence without tokens lies where it would begin.
    first_rank = torch.searchsorted(ends, cu[:-1], right=True).clamp(max=n - 1)
    last_rank = torch.where(cu.diff() > 0, torch.searchsorted(ends, cu[1:] - 1, right=True), first_rank)
    begins = first_rank == rank
    # 2. Rank r sends the state of the sequence at its last row; rank r + 1 continues it, if its first row does.
    last_ids = ids[(ends - 1).clamp(min=0)]
    received = ids[start.clamp(max=layout.total - 1)][None]
    continues = torch.cat([begins.new_zeros(1), last_ids[1:] == last_ids[:-1]])[None]
    order, here = torch.arange(n, device=ids.device)[None], torch.full((1, 1), rank, device=ids.device)
    before = torch.where(begins[received], 0, here)
    chain = Chain(order, continues, last_ids[rank][None], received, before, here)
    starts, stops = ((edge.clamp(start, end) - start) for edge in (cu[:-1], cu[1:]))
    sequence = torch.arange(len(starts), device=ids.device)
    return _in_blocks(layout, starts, stops, begins, last_rank == rank, sequence, chain, chunk_size)


def _in_blocks(
    layout: TokenLayout,
    starts: Tensor,
    stops: Tensor,
    begins: Tensor,
    ends: Tensor,
    sequence: Tensor,
    chain: Chain,
    chunk_size: int,
) -> Runs:
    everywhere = torch.arange(layout.counts[layout.cp_rank], device=starts.device)
    # 1. A block is at most as long as an average sequence here, because a block of a short run is mostly padding.
    typical = (layout.total if layout.is_identity else len(everywhere)) // len(starts)
    size = min(chunk_size, max(min(typical, len(everywhere)), 1))
    blocks = _blocks(starts, stops, everywhere, size)
    counts = -(-(stops - starts) // size)
    # 2. Without a host read there are as many blocks as any lengths need; the others are padding.
    if has_numbers() and not torch.compiler.is_compiling():
        used = max(int(counts.sum()), 1)  # a rank without tokens has a block of padding, and so takes part in backward
        blocks = replace(blocks, rows=blocks.rows[:used], segment=blocks.segment[:used])
    last = torch.where(counts > 0, counts.cumsum(0) - 1, -1)
    is_first = blocks.segment != torch.cat([blocks.segment.new_full((1,), -1), blocks.segment])[:-1]
    return Runs(blocks, is_first, last, sequence, begins, ends, chain)


class PassedStates(torch.autograd.Function):
    """The states that enter the received runs, from the states and the transitions of the runs of all ranks.

    Along each row of the chain left[m + 1] = transition[m] entering[m] + state[m], and entering[m] is left[m] if entry
    m continues the one before it, else 0. A rank's first run receives a state, and its last run sends one; they may be
    two runs. Backward runs along the row from its end, with the cotangents c of the states that enter:

        d left[m] = c[m] + transition[m]^T d left[m + 1], without the second term where entry m continues nothing
        d state[m] = d left[m + 1];   d transition[m] = d left[m + 1] entering[m]^T

    Cost:   1 all_gather of the states and transitions forward, 1 all_gather of the cotangents backward. Saves the
            transitions of all ranks, and this rank's entering states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "b g h k v"],
        transitions: Float[Tensor, "b g h k k"],
        chain: Chain,
        group: ProcessGroup,
    ) -> Float[Tensor, "b g h k v"]:
        gathered = _by_position(torch.cat([states, transitions], -1), chain, group)
        states, transitions = gathered.split([states.shape[-1], transitions.shape[-1]], -1)
        left, entering = [torch.zeros_like(states[:, :, 0])], []
        for m, continues in enumerate(chain.continues.unbind(1)):
            entering.append(torch.where(_per_row(continues), left[m], 0.0))
            left.append(transitions[:, :, m] @ entering[m] + states[:, :, m])
        ctx.save_for_backward(transitions, _of_this_rank(torch.stack(entering, 2), chain.position))
        ctx.chain, ctx.group = chain, group
        # No state enters a run that begins its sequence, wherever in the row it lies.
        return torch.where(_enters(chain), _of_this_rank(torch.stack(left, 2), chain.before), 0.0)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (cotangent,), chain = cotangents, ctx.chain
        transitions, entering = ctx.saved_tensors
        gathered = _by_position(torch.where(_enters(chain), cotangent, 0.0), chain, ctx.group)
        later, after = torch.zeros_like(gathered[:, :, 0]), []
        for m in reversed(range(gathered.shape[2])):
            after.append(later)
            later = transitions[:, :, m].transpose(-1, -2) @ later
            later = torch.where(_per_row(chain.continues[:, m]), later, 0.0) + gathered[:, :, m]
        of_states = _of_this_rank(torch.stack(after[::-1], 2), chain.position)
        return of_states, of_states @ entering.transpose(-1, -2), None, None


def _by_position(x: Float[Tensor, "b g h *a"], chain: Chain, group: ProcessGroup) -> Float[Tensor, "b q m h *a"]:
    """The tensors of all ranks' runs, in the order of the chain. One all_gather."""
    gathered = all_gather_stack(x, group).transpose(0, 1).flatten(1, 2)
    return large_tensors.index_select(gathered, chain.order.flatten(), 1).unflatten(1, chain.order.shape)


def _of_this_rank(x: Float[Tensor, "b q m *a"], places: Int64[Tensor, "q e"]) -> Float[Tensor, "b g *a"]:
    rows = torch.arange(len(places), device=places.device)[:, None] * x.shape[2] + places
    return large_tensors.index_select(x.flatten(1, 2), rows.flatten(), 1)


def _enters(chain: Chain) -> Bool[Tensor, "g 1 1 1"]:
    return (chain.before > 0).flatten()[:, None, None, None]


def _per_row(flags: Bool[Tensor, " q"]) -> Bool[Tensor, "q 1 1 1"]:
    return flags[:, None, None, None]
