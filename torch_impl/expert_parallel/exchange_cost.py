"""Compare the bytes that the two exchanges of routed experts send, to choose the cheaper one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch_impl.contract import NonNegativeInt, Number, PositiveInt, contract

Rows = Annotated[int, Number(0, integer=True, remedy=", or None for equal loads")]


@dataclass(frozen=True)
class ExchangeCost:
    """Bytes that the ranks of ep together send to other ranks for one layer forward, by exchange; as many backward.

    `fewest` is the exchange that sends less, all_to_all where both send as much.
    """

    all_to_all: int
    all_gather: int
    fewest: Literal["all_to_all", "all_gather"]


@contract
def fewest_exchange_bytes(
    *,
    tokens: NonNegativeInt,
    k: PositiveInt,
    width: PositiveInt,
    num_experts: PositiveInt,
    ep_size: PositiveInt,
    element_size: PositiveInt,
    rows_sent: Rows | None = None,
) -> ExchangeCost:
    """Which exchange sends less for `tokens` tokens of all ep ranks together, each with k of num_experts experts.

        all_to_all  2 * rows_sent * d * e + (n - 1) * num_experts * 8,              e = element_size, n = ep_size
        all_gather  (n - 1) * tokens * (d * e + k * (max(e, 4) + 8) + d * max(e, 4)) + (n - 1) * n * 8

    `width` is d. `rows_sent` are the rows whose expert is on another rank; without it those of equal loads,
    tokens * k * (n - 1) / n, rounded up. Sums travel in float32 or wider, numbers of experts and counts in int64. So
    all_gather is cheaper where tokens have about as many experts as there are ranks, or more.

    >>> fewest_exchange_bytes(tokens=4096, k=8, width=2048, num_experts=128, ep_size=8, element_size=2).fewest
    'all_to_all'
    >>> fewest_exchange_bytes(tokens=4096, k=8, width=2048, num_experts=16, ep_size=2, element_size=2).fewest
    'all_gather'

    Errors: TypeError for a size that is no integer; ValueError for one out of range, num_experts that ep ranks cannot
            share equally, or more rows than choices.
    """
    function = "expert_parallel.fewest_exchange_bytes"
    if num_experts % ep_size:
        raise ValueError(f"{function}: num_experts={num_experts} must be divisible by ep_size={ep_size}")
    others, choices = ep_size - 1, tokens * k
    rows = -(-choices * others // ep_size) if rows_sent is None else rows_sent
    if rows > choices:
        raise ValueError(f"{function}: rows_sent={rows} of {choices} choices; count those to other ranks alone")
    wide = max(element_size, 4)
    by_all_to_all = 2 * rows * width * element_size + others * num_experts * 8
    of_token = width * element_size + k * (wide + 8) + width * wide
    by_all_gather = others * tokens * of_token + others * ep_size * 8
    fewest = "all_gather" if by_all_gather < by_all_to_all else "all_to_all"
    return ExchangeCost(by_all_to_all, by_all_gather, fewest)
