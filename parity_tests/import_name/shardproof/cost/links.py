"""Bytes and time of a collective on links: rings and trees over hosts, as in NCCL's own model.

Bytes are for the busiest rank of a group. docs/reference/cost.md has the formulas and their sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardproof.cost.placement import Placement
from shardproof.cost.sheet import Algorithm, Sheet
from shardproof.engines.ledger import MESSAGES

# For a ring over n ranks: steps, and bytes sent per byte of a rank's input.
RINGS = {
    "all_gather": lambda n: (n - 1, n - 1.0),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "broadcast": lambda n: (n - 1, 1.0),
    "reduce": lambda n: (n - 1, 1.0),
    "barrier": lambda n: (2 * (n - 1), 0.0),
}
# Sent directly to the target rank: peers, and bytes per byte of input.
DIRECT = {
    "all_to_all": lambda n: (n - 1, (n - 1) / n),
    "scatter": lambda n: (n - 1, (n - 1) / n),
    "gather": lambda n: (n - 1, n - 1.0),  # for the root, which receives from all
}
OPS = (*RINGS, *DIRECT, *MESSAGES)


@dataclass(frozen=True)
class Price:
    """Bytes that the busiest rank sends within its host and to other hosts, and the seconds that all calls take."""

    inside: float = 0.0
    between: float = 0.0
    seconds: float = 0.0


def price(op: str, calls: int, size: int, place: Placement, sheet: Sheet) -> Price:
    """The price of `calls` calls of an op with `size` bytes of input in total. Errors: ValueError for an unknown op."""
    if op not in OPS:
        raise ValueError(f"cost names {op!r}, which has no cost model; the modelled ops are {', '.join(OPS)}")
    if place.ranks == 1 or calls == 0:
        return Price()
    rings = [algorithm for algorithm in sheet.algorithms if algorithm.kind == "ring"]
    trees = [algorithm for algorithm in sheet.algorithms if algorithm.kind == "tree"]
    if op in MESSAGES:
        return _cheapest([_message(op, calls, size, place, sheet, way) for way in rings])
    if op in DIRECT:
        return _cheapest([_direct(op, calls, size, place, sheet, way) for way in rings])
    prices = [_ring(op, calls, size, place, sheet, way) for way in rings]
    prices += [_tree(calls, size, place, sheet, way) for way in trees if op == "all_reduce"]
    return _cheapest(prices)


def _cheapest(prices: list[Price]) -> Price:
    """The lowest price: a library is assumed to choose its fastest algorithm."""
    return min(prices, key=lambda each: each.seconds)


def _ring(op: str, calls: int, size: int, place: Placement, sheet: Sheet, way: Algorithm) -> Price:
    """A ring enters and leaves each host once; its channels share that host's adapters."""
    steps, share = RINGS[op](place.ranks)
    sent = size * share
    if place.hosts == 1:
        seconds = calls * (way.call_seconds + steps * way.inside_seconds)
        return Price(sent, 0.0, seconds + sent / (way.bandwidth_share * sheet.inside_bytes_per_second))
    crossing_steps = steps * (place.hosts - 1) // (place.ranks - 1)
    waits = (steps - crossing_steps) * way.inside_seconds + crossing_steps * way.between_seconds
    seconds = calls * (way.call_seconds + waits) + sent / (way.bandwidth_share * _ring_bandwidth(place, sheet))
    between = sent / place.fewest
    return Price(sent - between, between, seconds)


def _ring_bandwidth(place: Placement, sheet: Sheet) -> float:
    """Bandwidth of a ring over hosts: the adapters of the host with the fewest ranks, at most a rank's own links."""
    crossing = place.fewest * sheet.between_bytes_per_second
    return min(sheet.inside_bytes_per_second, crossing) if place.fewest > 1 else crossing


def _tree(calls: int, size: int, place: Placement, sheet: Sheet, way: Algorithm) -> Price:
    """Reduce up the tree and broadcast down: a chain inside each host, and a binary tree over the hosts."""
    waits = (math.ceil(place.ranks / place.hosts) - 1) * way.inside_seconds
    waits += int(math.log2(place.hosts)) * way.between_seconds
    bandwidth = sheet.inside_bytes_per_second if place.hosts == 1 else _ring_bandwidth(place, sheet)
    seconds = calls * (way.call_seconds + 2 * waits) + 2 * size / (way.bandwidth_share * bandwidth)
    between = 0.0 if place.hosts == 1 else 2 * size / place.fewest
    return Price(2 * size - between, between, seconds)


def _direct(op: str, calls: int, size: int, place: Placement, sheet: Sheet, way: Algorithm) -> Price:
    """A message to each peer. Both kinds of link work at once; each message is posted, and the latency counts once."""
    peers, share = DIRECT[op](place.ranks)
    outside = place.ranks - place.fewest if place.hosts > 1 else 0
    sent = size * share
    between = sent * outside / peers
    wait = way.between_seconds if outside else way.inside_seconds
    transfer = max((sent - between) / sheet.inside_bytes_per_second, between / sheet.between_bytes_per_second)
    start = calls * (way.call_seconds + wait + peers * sheet.message_seconds)
    return Price(sent - between, between, start + transfer / way.bandwidth_share)


def _message(op: str, calls: int, size: int, place: Placement, sheet: Sheet, way: Algorithm) -> Price:
    """A message to the neighbour; in a group on several hosts, the message between hosts sets the time of all.

    A receive costs nothing: it runs at the same time as the send, in the other direction.
    """
    if op == "recv":
        return Price()
    bandwidth = sheet.inside_bytes_per_second if place.hosts == 1 else sheet.between_bytes_per_second
    wait = way.inside_seconds if place.hosts == 1 else way.between_seconds
    seconds = calls * (way.call_seconds + wait) + size / (way.bandwidth_share * bandwidth)
    return Price(size, 0.0, seconds) if place.hosts == 1 else Price(0.0, size, seconds)
