"""Bytes that attention sends for one document in dual_chunk_swap, in closed form, for meshes too large to list pairs.

The ring's amounts are for the rank that sends most: K and V of each chunk that another rank's query attends to; under a
causal mask only its own rank attends to the very last chunk. Windows and packed sequences have no closed form here.
"""

from __future__ import annotations

from collections.abc import Callable

from shardproof.cost.attention import gathered_cost, heads_cost, products
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Cost


def ring_form(case: CaseSpec, ranks: int, heads: int, causal: bool, axis: str) -> Cost:
    """A ring: keys of `heads` heads travel to all other ranks; their gradients follow them and return to the source."""
    messages, rows = ranks - 1, case.s // ranks
    row = case.b * 2 * heads * case.p
    unseen = rows // 2 if causal else 0
    keys, gradients = row * case.itemsize, row * case.accumulator_itemsize
    # The last rank does not pass on the first rank's keys, and the first rank keeps its own gradient: no rank sends
    # both in full.
    back = messages * rows * (keys + gradients) - unseen * min(keys, gradients)
    ends = (f"send/{axis}", f"recv/{axis}") if messages else ()
    forward = dict.fromkeys(ends, (messages, messages * rows * keys))
    return Cost(forward, dict.fromkeys(ends, (2 * messages, back)), products(case, causal))


def over_one_axis(causal: bool) -> Callable[[CaseSpec], Cost]:
    """The cost of attention over cp, with the exchange that the case's options name."""

    def cost(case: CaseSpec) -> Cost:
        rows = case.s // case.cp
        if case.options["exchange"] == "ring":
            return ring_form(case, case.cp, case.g, causal, "cp")
        other = (
            gathered_cost(case, rows) if case.options["exchange"] == "all_gather" else heads_cost(case, case.cp, rows)
        )
        return Cost(other.forward, other.backward, products(case, causal))

    return cost


def over_two_axes(causal: bool) -> Callable[[CaseSpec], Cost]:
    """The cost of USP: heads are exchanged over axis `heads`, keys travel over axis `ring`."""

    def cost(case: CaseSpec) -> Cost:
        mixed = heads_cost(case, case.heads, case.s // (case.heads * case.ring), "heads")
        keys = ring_form(case, case.ring, max(case.g, case.heads) // case.heads, causal, "ring")
        return Cost({**mixed.forward, **keys.forward}, {**mixed.backward, **keys.backward}, products(case, causal))

    return cost
