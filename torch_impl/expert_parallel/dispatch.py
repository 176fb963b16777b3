"""Dispatch and combine: the rows of tokens to the ranks of their experts, and what the experts return, back.

A *choice* is a slot of a token: choice i is slot i % k of token i // k. Each rank sorts its choices by expert, so that
the rows for one rank of ep lie side by side, and sends them with one uneven all_to_all. What arrives is in order of
source rank, then of expert; an index array sorts it by expert alone. Combine goes the same way back: rows return to
where they were sent from, in the order in which they were sent, and there each is weighed by its gate.

With expert tensor parallelism the tokens are sharded over tp too, so that none is sent twice: a rank exchanges over ep
among the ranks of its own tp coordinate, and the rows that these received are gathered over tp, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding_bag

from torch_impl.collectives import accumulator, all_gather, all_to_all, large_tensors, reduce_scatter
from torch_impl.collectives.plain import all_gather_stack, all_to_all_equal
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.layouts.index_arrays import inverse_permutation
from torch_impl.layouts.reorder import _permute


@dataclass(frozen=True)
class SortedChoices:
    """Choices in the order of their experts, tokens in order within one; those of no expert are behind all others.

    `order` are the choices, `counts` how many each expert has.
    """

    order: Tensor
    counts: Tensor
    slots: int  # choices of a token

    def first(self, count: int) -> SortedChoices:
        """The first `count` choices: those of some expert, where that many are."""
        return replace(self, order=self.order[:count])

    def rows(self, x: Tensor) -> Tensor:
        """The row of the token of each choice. Gradients of a token's rows are summed in float32 or wider."""
        return _Rows.apply(x, self.order, self.slots)

    def weighed_sums(self, rows: Tensor, gates: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of the rows of each token times their gates, [tokens, d]; zeros for a token without choices.

        Products and sums are in float32 or wider and are rounded to `dtype` once.
        """
        # Rows that have another dtype than gates or sums are widened first; else they are read where they are.
        wide = dtype if rows.dtype == gates.dtype == dtype else accumulator(rows.dtype)
        return _WeighedSums.apply(rows.to(wide), gates.to(wide), self.order).to(dtype)


def sorted_choices(experts: Tensor, size: int, first: int = 0, kept: Tensor | None = None) -> SortedChoices:
    """The choices of the experts from `first` to first + size that are `kept`, then all others."""
    # 1. Experts from 0 to size; every other choice gets the number `size`, which is sorted behind all of them.
    numbers = experts.flatten().long() - first
    is_here = (numbers >= 0) & (numbers < size)
    if kept is not None:
        is_here = is_here & kept.flatten()
    numbers = torch.where(is_here, numbers, size)
    # 2. How many each has, without a bincount, which would wait for the device.
    counts = numbers.new_zeros(size + 1).scatter_add_(0, numbers, torch.ones_like(numbers))[:size]
    return SortedChoices(numbers.argsort(stable=True), counts, experts.shape[1])


@dataclass(frozen=True)
class Exchange:
    """How many rows go from and to each rank of ep and of tp, and the order of what arrives.

    `to_ranks` and `from_ranks` count the rows that this rank sends to and receives from each rank of ep, `of_tp` those
    that each rank of tp received. `by_expert` sorts the rows of all tp ranks by expert, `by_source` back; `counts` has
    the rows of each expert of this rank.
    """

    to_ranks: list[int]
    from_ranks: list[int]
    of_tp: list[int]
    by_expert: Tensor
    by_source: Tensor
    counts: Tensor

    def dispatched(self, rows: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Tensor:
        """The rows of this rank's experts, sorted by expert, from rows sorted by expert on each rank."""
        received = all_to_all(
            rows, ep, split_dim=0, concat_dim=0, split_lengths=self.to_ranks, concat_lengths=self.from_ranks
        )
        # Each tp rank has a part of the expert's columns, so the cotangents of a row are addends: "R".
        gathered = received if tp is None else all_gather(received, tp, out="R", lengths=self.of_tp)
        return _permute(gathered, (self.by_expert, self.by_source), 0)

    def returned(self, rows: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Tensor:
        """What the experts made of the rows, back on the ranks that sent them and in the order of sending."""
        sorted_by_source = _permute(rows, (self.by_source, self.by_expert), 0)
        summed = sorted_by_source if tp is None else reduce_scatter(sorted_by_source, tp, lengths=self.of_tp)
        return all_to_all(
            summed, ep, split_dim=0, concat_dim=0, split_lengths=self.from_ranks, concat_lengths=self.to_ranks
        )


def exchange_of(counts: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Exchange:
    """The exchange of rows of which this rank has counts[e] for each expert e of all ranks.

    Cost:   1 all_to_all of counts over ep, 1 all_gather of the received ones over tp, none in a group of one; one host
            read of both.
    """
    # 1. Of the experts of this rank: how many rows each rank of ep sends here, and the same of every tp rank.
    sent = counts.view(ep.size(), -1)
    received = all_to_all_equal(sent, ep)
    of_tp = received[None] if tp is None else all_gather_stack(received, tp)  # tp, source, expert
    here = 0 if tp is None else tp.rank()
    # 2. The lengths of messages are needed on the host: one read for all of them.
    per_rank = torch.cat([sent.sum(1), of_tp.sum(2).flatten()]).tolist()
    sources = torch.tensor(per_rank[ep.size() :]).view(len(of_tp), -1)
    # 3. Rows arrive by tp rank, source and expert. A stable sort by expert keeps the order of sources within one.
    numbers = torch.arange(of_tp.shape[2], device=counts.device).expand(of_tp.shape).flatten()
    experts = numbers.repeat_interleave(of_tp.flatten(), output_size=int(sources.sum()))
    by_expert = experts.argsort(stable=True)
    return Exchange(
        to_ranks=per_rank[: ep.size()],
        from_ranks=sources[here].tolist(),
        of_tp=sources.sum(1).tolist(),
        by_expert=by_expert,
        by_source=inverse_permutation(by_expert),
        counts=of_tp.sum((0, 1)),
    )


class _Rows(torch.autograd.Function):
    """The rows of tokens by choice: a token that is read several times has the sum of its rows' cotangents."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.slots, ctx.tokens = slots, len(x)
        return large_tensors.index_select(x, order // slots)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _Sums.apply(cotangent, order, ctx.slots, ctx.tokens), None, None


class _Sums(torch.autograd.Function):
    """The sum of the rows of each token; the transpose of `_Rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, slots: int, tokens: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.slots = slots
        return _sums_by_token(rows, *_rows_of_tokens(order, slots, tokens))

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _Rows.apply(cotangent, order, ctx.slots), None, None, None


class _WeighedSums(torch.autograd.Function):
    """y[t] = sum_j gates[t, j] * (the row of choice j of t), from rows in the order of choices `order`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gates, order)
        row_of_place, starts = _rows_of_tokens(order, gates.shape[1], len(gates))
        gates_of_rows = gates.flatten().index_select(0, order)
        return _sums_by_token(rows, row_of_place, starts, gates_of_rows.index_select(0, row_of_place))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        rows, gates, order = ctx.saved_tensors
        needs_rows, needs_gates, _ = ctx.needs_input_grad
        tokens, of_rows, of_gates = order // gates.shape[1], None, None
        if needs_gates:
            products = _products_with_tokens(rows, cotangent, tokens)
            flat = gates.new_zeros(gates.numel()).index_copy_(0, order, products.to(gates.dtype))
            of_gates = flat.view(gates.shape)
        if needs_rows:
            of_rows = large_tensors.index_select(cotangent, tokens)
            of_rows.mul_(gates.flatten().index_select(0, order)[:, None])
        return of_rows, of_gates, None


def _products_with_tokens(rows: Tensor, cotangent: Tensor, tokens: Tensor) -> Tensor:
    """<rows[i], cotangent[tokens[i]]> of each row, summed in float32 or wider and rounded once.

    As the derivative of `embedding_bag` by its weights, which reads both where they are: no row is copied.
    """
    places = torch.arange(len(rows), device=rows.device)
    derivative = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return derivative(cotangent, rows, places, places, tokens, 0)  # 0 is the mode "sum"


def _sums_by_token(rows: Tensor, row_of_place: Tensor, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, times their weights, in one pass, in float32 or wider and rounded once."""
    return embedding_bag(row_of_place, rows, starts, mode="sum", per_sample_weights=weights)


def _rows_of_tokens(order: Tensor, slots: int, tokens: int) -> tuple[Tensor, Tensor]:
    """(the row of each choice that has one, token by token; how many rows the tokens before each have).

    Row i is of choice order[i]; sums run in the order of a token's choices on every device.
    """
    has_row = order.new_zeros(tokens * slots).index_fill_(0, order, 1)
    ends = has_row.cumsum(0)
    row_of_place = torch.empty_like(order)
    row_of_place[ends.index_select(0, order) - 1] = torch.arange(len(order), device=order.device)
    return row_of_place, (ends - has_row)[::slots]
