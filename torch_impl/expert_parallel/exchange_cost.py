"""Compare the bytes that the two exchanges of routed experts send, and choose the cheaper one."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Annotated, Literal

from torch_impl.contract import NonNegativeInt, Number, PositiveInt, Rejected, contract

Rows = Annotated[int, Number(0, integer=True, remedy=", or None for equal loads")]
COUNT, EXPERT = 8, 4  # bytes of a row count, and of an expert id


@dataclass(frozen=True)
class ExchangeCost:
    """The bytes that all ep ranks together send to other ranks in one layer's forward, for each exchange.

    `fewest` is the exchange that sends less; all_to_all if both send the same.
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
    """The bytes that each exchange sends for `tokens` tokens on all ep ranks together, with k experts per token.

        all_to_all  rows_sent * (2 * d * e + k * (w + 4)) + (n - 1) * n * 16        w = max(e, 4), n = ep_size
        all_gather  (n - 1) * tokens * (d * e + k * (w + 4) + d * w) + (n - 1) * n * 8,         e = element_size

    `width` is d. `rows_sent` counts a token once for each other rank that has any of its experts. The default is the
    mean over all sets of k experts, rounded up: tokens * (n - 1) times the probability that a rank has any of a token's
    experts, 1 - C(num_experts - num_experts / n, k) / C(num_experts, k). Gates and the sums of all_gather are sent in
    float32 or wider, expert ids in int32, counts in int64. All ranks have the same number of tokens here; otherwise
    all_gather pads to the longest. all_gather sends less only if almost every token goes to almost every rank, and x
    is as wide as the sums.

    >>> fewest_exchange_bytes(tokens=4096, k=8, width=2048, num_experts=128, ep_size=8, element_size=2).fewest
    'all_to_all'
    >>> fewest_exchange_bytes(tokens=4096, k=8, width=2048, num_experts=16, ep_size=2, element_size=4).fewest
    'all_gather'

    Errors: TypeError for a size that is not an integer; ValueError for a size out of range, num_experts that ep_size
            does not divide, k above num_experts, or more rows than the tokens can have.
    """
    if num_experts % ep_size:
        raise Rejected(f"num_experts={num_experts} must be divisible by ep_size={ep_size}")
    if k > num_experts:
        raise Rejected(f"k={k} must be at most num_experts={num_experts}")
    others = ep_size - 1
    most = tokens * min(k, others)
    rows = mean_rows(tokens * others, k, num_experts, ep_size) if rows_sent is None else rows_sent
    if rows > most:
        raise Rejected(f"rows_sent={rows} must be at most {most}; count a token once for each other rank")
    wide = max(element_size, 4)
    routing = k * (wide + EXPERT)
    by_all_to_all = rows * (2 * width * element_size + routing) + others * ep_size * 2 * COUNT
    by_all_gather = others * tokens * (width * element_size + routing + width * wide) + others * ep_size * COUNT
    fewest = "all_gather" if by_all_gather < by_all_to_all else "all_to_all"
    return ExchangeCost(by_all_to_all, by_all_gather, fewest)


def mean_rows(pairs: int, k: int, num_experts: int, ranks: int) -> int:
    """The mean number of (token, rank) pairs in which the rank has any of the token's k experts, rounded up.

    Every set of k experts is equally likely.
    """
    sets, without = comb(num_experts, k), comb(num_experts - num_experts // ranks, k)
    return -(-pairs * (sets - without) // sets)
