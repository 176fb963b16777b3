"""Dispatch and combine: send each token to the ranks of its experts, and return the sums of the experts' outputs.

A *choice* is one slot of a token: choice i is slot i % k of token i // k. A token is sent once to each ep rank that has
any of its experts, with its gates and expert ids, in uneven all_to_alls. The receiving rank sorts the choices of its
experts by an index array and sums the outputs of each token, so one row comes back from each rank that a token was sent
to. The token's rank adds up these rows.

With expert tensor parallelism the tokens are sharded over tp too, so no token is sent twice: a rank exchanges over ep
with the ranks of its own tp coordinate, and the received rows are gathered over tp, once.
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
    """Choices sorted by expert, then by token, with all other choices last.

    `order` are the choices, `counts` is their number per expert. Row i of `rows` and `sums` belongs to choice order[i].
    """

    order: Tensor
    counts: Tensor
    tokens: int
    slots: int  # choices of a token

    def first(self, count: int) -> SortedChoices:
        """The first `count` choices: with the sum of `counts`, exactly the choices of these experts."""
        return replace(self, order=self.order[:count])

    def rows(self, x: Tensor) -> Tensor:
        """The token's row of x for each choice. Gradients of a token's rows are summed in float32 or wider."""
        return _Rows.apply(x, self)

    def sums(self, rows: Tensor) -> Tensor:
        """The sum of each token's rows, computed in float32 or wider and rounded once."""
        return _Sums.apply(rows, self)

    @cached_property
    def token_of_row(self) -> Tensor:
        """The token of each row."""
        return self.order // self.slots

    @cached_property
    def rows_by_token(self) -> tuple[Tensor, Tensor]:
        """(rows sorted by token, number of rows before each token).

        A token's rows are in the order of its choices, so that every device sums in the same order.
        """
        has_row = self.order.new_zeros(self.tokens * self.slots).index_fill_(0, self.order, 1)
        ends = has_row.cumsum(0)
        row_of_place = torch.empty_like(self.order)
        rows = torch.arange(len(self.order), device=self.order.device)
        row_of_place.scatter_(0, ends.index_select(0, self.order) - 1, rows)
        return row_of_place, (ends - has_row)[:: self.slots]


def sorted_choices(experts: Tensor, size: int, first: int = 0, kept: Tensor | None = None) -> SortedChoices:
    """Sort the choices of experts `first` to first + size - 1 that are `kept` to the front, all others behind them."""
    # 1. Number the experts from 0. Every other choice gets the number `size`, which sorts last.
    numbers = experts.flatten().long() - first
    is_here = (numbers >= 0) & (numbers < size)
    if kept is not None:
        is_here = is_here & kept.flatten()
    numbers = torch.where(is_here, numbers, size)
    # 2. Count without bincount, which would wait for the device.
    counts = numbers.new_zeros(size + 1).scatter_add_(0, numbers, torch.ones_like(numbers))[:size]
    # 3. Narrow integers are sorted in fewer passes, on a CPU and on a GPU.
    narrow = numbers.to(torch.int16) if size <= torch.iinfo(torch.int16).max else numbers
    return SortedChoices(narrow.argsort(stable=True), counts, *experts.shape)


def destinations(experts: Tensor, ranks: int, local: int) -> tuple[SortedChoices, Tensor]:
    """(choices of ranks: each token once for each rank that it is sent to, counts [ranks, 2] of rows and of choices).

    Rank r has experts r * local to (r + 1) * local - 1. Padding ids, such as -1, are sent to no rank.
    """
    is_expert = (experts >= 0) & (experts < ranks * local)
    owners = torch.where(is_expert, experts.div(local, rounding_mode="floor"), ranks).long()
    of_rank = owners.new_zeros(len(experts), ranks + 1).scatter_add_(1, owners, torch.ones_like(owners))[:, :ranks]
    each_rank = torch.arange(ranks, device=experts.device).expand(len(experts), ranks)
    targets = sorted_choices(each_rank, ranks, kept=of_rank > 0)
    return targets, torch.stack([targets.counts, of_rank.sum(0)], 1)


@dataclass(frozen=True)
class Messages:
    """The number of rows that this rank exchanges with each rank of ep and of tp.

    `to_ranks` and `from_ranks` are the rows that this rank sends to and receives from each ep rank, `of_tp` is the
    number of rows that each tp rank received, and `choices` is the number of choices of local experts in all of them.
    """

    to_ranks: list[int]
    from_ranks: list[int]
    of_tp: list[int]
    choices: int

    def dispatched(self, rows: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Tensor:
        """Send rows, sorted by destination; returns the rows for this rank's experts, by tp rank, then by ep rank."""
        received = exchange_rows(rows, ep, self.to_ranks, self.from_ranks)
        # Each tp rank has some of an expert's columns, so the cotangents of a row are terms of a sum: "R".
        return received if tp is None else gather_rows(received, tp, self.of_tp, "R")

    def returned(self, rows: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Tensor:
        """Sum the dispatched rows' results over tp, and send them back to their ranks, in the order they were sent."""
        summed = rows if tp is None else reduce_scatter_rows(rows, tp, self.of_tp)
        return exchange_rows(summed, ep, self.from_ranks, self.to_ranks)


def messages_of(counts: Tensor, ep: ProcessGroup, tp: ProcessGroup | None) -> Messages:
    """The messages of a rank that sends counts[i] = (rows, choices) to ep rank i.

    Cost:   1 all_to_all of counts over ep, 1 all_gather of the received counts over tp, none in a group of one; one
            host read for both.
    """
    received = all_to_all_equal(counts, ep)
    of_tp = received[None] if tp is None else all_gather_stack(received, tp)  # [tp, source, 2]
    # The host needs the lengths of the messages: read all of them at once.
    sent, *arriving = torch.cat([counts[None], of_tp]).tolist()
    here = 0 if tp is None else tp.rank()
    return Messages(
        to_ranks=[rows for rows, _ in sent],
        from_ranks=[rows for rows, _ in arriving[here]],
        of_tp=[sum(rows for rows, _ in sources) for sources in arriving],
        choices=sum(choices for sources in arriving for _, choices in sources),
    )


class _Rows(torch.autograd.Function):
    """A token's row for each choice. A token's cotangent is the sum of its rows' cotangents."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, choices: SortedChoices) -> Tensor:
        ctx.choices = choices
        tokens = choices.token_of_row
        if x.is_cpu and x.itemsize == 2 and len(tokens):
            # embedding_bag prefetches rows and takes 0.6 of index_select's time. Each bag has one row, so the only
            # difference is that -0.0 becomes 0.0.
            return embedding_bag(tokens, x.detach(), torch.arange(len(tokens)), mode="sum")
        return large_tensors.index_select(x, tokens)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _Sums.apply(cotangent, ctx.choices), None


class _Sums(torch.autograd.Function):
    """The sum of each token's rows; the transpose of `_Rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, choices: SortedChoices) -> Tensor:
        ctx.choices = choices
        # One pass, in float32 or wider, rounded once.
        places, starts = choices.rows_by_token
        return embedding_bag(places, rows.detach(), starts, mode="sum")

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _Rows.apply(cotangent, ctx.choices), None
