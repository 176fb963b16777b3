"""Dispatch and combine: the rows of tokens to the ranks of their experts, and the sums of what experts return, back.

A *choice* is a slot of a token: choice i is slot i % k of token i // k. A token travels once to each rank of ep that
has one or more of its experts, however many these are; its gates and the numbers of its experts travel with it, in
uneven all_to_alls. There an index array sorts the choices of local experts by expert. What these experts make of a
token is summed before it goes back, and its own rank adds up one row for each rank that it was sent to.

With expert tensor parallelism the tokens are sharded over tp too, so that none is sent twice: a rank exchanges over ep
among the ranks of its own tp coordinate, and the rows that these received are gathered over tp, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding_bag

from torch_impl.collectives import large_tensors
from torch_impl.collectives.exchanges import exchange_rows
from torch_impl.collectives.gathers import gather_rows, reduce_scatter_rows
from torch_impl.collectives.plain import all_gather_stack, all_to_all_equal


@dataclass(frozen=True)
class SortedChoices:
    """Choices in the order of their experts, tokens in order within one; those of no expert are behind all others.

    `order` are the choices, `counts` how many each expert has. Row i, of `rows` and for `sums`, is of choice order[i].
    """

    order: Tensor
    counts: Tensor
    tokens: int
    slots: int  # choices of a token

    def first(self, count: int) -> SortedChoices:
        """The first `count` choices: those of some expert, where that many are."""
        return replace(self, order=self.order[:count])

    def rows(self, x: Tensor) -> Tensor:
        """The row of the token of each choice. Gradients of a token's rows are summed in float32 or wider."""
        return _Rows.apply(x, self)

    def sums(self, rows: Tensor) -> Tensor:
        """The sum of the rows of each token, in float32 or wider, rounded once."""
        return _Sums.apply(rows, self)

    @cached_property
    def token_of_row(self) -> Tensor:
        """The token of each row."""
        return self.order // self.slots

    @cached_property
    def rows_by_token(self) -> tuple[Tensor, Tensor]:
        """(the rows, token by token; how many rows the tokens before each have).

        Sums run in the order of a token's choices on every device.
        """
        has_row = self.order.new_zeros(self.tokens * self.slots).index_fill_(0, self.order, 1)
        ends = has_row.cumsum(0)
        row_of_place = torch.empty_like(self.order)
        rows = torch.arange(len(self.order), device=self.order.device)
        row_of_place.scatter_(0, ends.index_select(0, self.order) - 1, rows)
        return row_of_place, (ends - has_row)[:: self.slots]


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
    # 3. Narrow numbers are sorted in fewer passes, on a CPU and on a GPU.
    narrow = numbers.to(torch.int16) if size <= torch.iinfo(torch.int16).max else numbers
    return SortedChoices(narrow.argsort(stable=True), counts, *experts.shape)


def destinations(experts: Tensor, ranks: int, local: int) -> tuple[SortedChoices, Tensor]:
    """(the ranks that each token is sent to, each once, as choices of ranks; the rows and the choices for each rank).

    The counts are [ranks, 2]. Rank r has the experts from r * local on; a number of no expert, such as -1, has no rank.
    """
    is_expert = (experts >= 0) & (experts < ranks * local)
    owners = torch.where(is_expert, experts.div(local, rounding_mode="floor"), ranks).long()
    of_rank = owners.new_zeros(len(experts), ranks + 1).scatter_add_(1, owners, torch.ones_like(owners))[:, :ranks]
    each_rank = torch.arange(ranks, device=experts.device).expand(len(experts), ranks)
    targets = sorted_choices(each_rank, ranks, kept=of_rank > 0)
    return targets, torch.stack([targets.counts, of_rank.sum(0)], 1)


@dataclass(frozen=True)
class Messages:
    """How many rows go from and to each rank of ep and of tp.

    `to_ranks` and `from_ranks` count the rows that this rank sends to and receives from each rank of ep, `of_tp` those
    that each rank of tp received, and `choices` the choices of local experts that come with all of them.
    """

    to_ranks: list[int]
    from_ranks: list[int]
    of_tp: list[int]
    choices: int

    def dispatched(self, rows: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Tensor:
        """The rows for this rank of ep, by tp rank and source, from rows that each rank has in order of destination."""
        received = exchange_rows(rows, ep, self.to_ranks, self.from_ranks)
        # Each tp rank has a part of the expert's columns, so the cotangents of a row are addends: "R".
        return received if tp is None else gather_rows(received, tp, self.of_tp, "R")

    def returned(self, rows: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Tensor:
        """What was made of the dispatched rows, summed over tp, back on the ranks that sent them, in that order."""
        summed = rows if tp is None else reduce_scatter_rows(rows, tp, self.of_tp)
        return exchange_rows(summed, ep, self.from_ranks, self.to_ranks)


def messages_of(counts: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Messages:
    """The messages of a rank with counts[i] = (rows, choices) for rank i of ep.

    Cost:   1 all_to_all of counts over ep, 1 all_gather of the received ones over tp, none in a group of one; one host
            read of both.
    """
    received = all_to_all_equal(counts, ep)
    of_tp = received[None] if tp is None else all_gather_stack(received, tp)  # [tp, source, 2]
    # The lengths of messages are needed on the host: one read for all of them.
    sent, *arriving = torch.cat([counts[None], of_tp]).tolist()
    here = 0 if tp is None else tp.rank()
    return Messages(
        to_ranks=[rows for rows, _ in sent],
        from_ranks=[rows for rows, _ in arriving[here]],
        of_tp=[sum(rows for rows, _ in sources) for sources in arriving],
        choices=sum(choices for sources in arriving for _, choices in sources),
    )


class _Rows(torch.autograd.Function):
    """The rows of tokens by choice: a token that is read several times has the sum of its rows' cotangents."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, choices: SortedChoices) -> Tensor:
        ctx.choices = choices
        tokens = choices.token_of_row
        if x.is_cpu and x.itemsize == 2 and len(tokens):
            # Sums of one row each, whose only trace is that -0.0 becomes 0.0: embedding_bag fetches rows ahead, which
            # takes 0.6 of index_select's time.
            return embedding_bag(tokens, x.detach(), torch.arange(len(tokens)), mode="sum")
        return large_tensors.index_select(x, tokens)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _Sums.apply(cotangent, ctx.choices), None


class _Sums(torch.autograd.Function):
    """The sum of the rows of each token; the transpose of `_Rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, choices: SortedChoices) -> Tensor:
        ctx.choices = choices
        # In one pass, in float32 or wider, rounded once.
        places, starts = choices.rows_by_token
        return embedding_bag(places, rows.detach(), starts, mode="sum")

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _Rows.apply(cotangent, ctx.choices), None
