"""What attention sends of one document in dual_chunk_swap, in closed form, on meshes where pairs cannot be listed.

The ring's amounts are those of the rank that sends most, of K and V in each chunk that a query of another rank sees:
with a causal rule the last chunk of all is seen by its own rank alone. Windows and packed sequences have no such form.
"""

from __future__ import annotations

from collections.abc import Callable

from parity_tests.context_parallel.attention_schemes import gathered_cost, heads_cost, products
from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declared import Cost


def ring_form(case: CaseSpec, ranks: int, heads: int, causal: bool, axis: str) -> Cost:
    """Keys of `heads` heads travel to all other ranks, and so do their gradients, which then return to them."""
    messages, rows = ranks - 1, case.s // ranks
    row = case.b * 2 * heads * case.p
    unseen = rows // 2 if causal else 0
    keys, gradients = row * case.itemsize, row * case.accumulator_itemsize
    # The last rank alone passes on no keys of the first, and the first no gradient of its own: none sends all of both.
    back = messages * rows * (keys + gradients) - unseen * min(keys, gradients)
    ends = (f"send/{axis}", f"recv/{axis}") if messages else ()
    forward = dict.fromkeys(ends, (messages, messages * rows * keys))
    return Cost(forward, dict.fromkeys(ends, (2 * messages, back)), products(case, causal))


def over_one_axis(causal: bool) -> Callable[[CaseSpec], Cost]:
    """The cost of the exchange among the options of a case, over cp."""

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
    """The cost of USP: heads are exchanged over the axis of this name, keys travel over ring."""

    def cost(case: CaseSpec) -> Cost:
        mixed = heads_cost(case, case.heads, case.s // (case.heads * case.ring), "heads")
        keys = ring_form(case, case.ring, max(case.g, case.heads) // case.heads, causal, "ring")
        return Cost({**mixed.forward, **keys.forward}, {**mixed.backward, **keys.backward}, products(case, causal))

    return cost
