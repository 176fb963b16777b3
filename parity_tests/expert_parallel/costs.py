"""The bytes that each exchange sends on each rank of a case, in closed form in the drawn counts."""

from __future__ import annotations

import numpy as np

from parity_tests.expert_parallel.choices import shards
from shardproof import Cost

INT64, INT32 = 8, 4


def _chosen(scheme, case):
    """Of each rank its choices, -1 where one is not kept."""
    experts = shards(scheme, "experts", case)
    names = [arg.name for arg in scheme.inputs]
    kept = shards(scheme, "kept", case) if "kept" in names else [np.full(x.shape, True) for x in experts]
    return [np.where(k, e, -1) for e, k in zip(experts, kept, strict=True)]


def cost_by_all_to_all(scheme, case):
    """Each token goes once to each rank of its experts, with gates and choices, and sums come back; counts go once."""
    ep, tp = case.ep, case.mesh.get("tp", 1)
    here = case.e // ep  # experts of a rank
    by_rank = _chosen(scheme, case)
    row, gates, choices = case.d * case.itemsize, case.k * case.accumulator_itemsize, case.k * INT32
    counts, counted = ((1, ep * 2 * INT64) if size > 1 else (0, 0) for size in (ep, tp))
    costs = []
    for rank in range(ep * tp):
        owner, column = divmod(rank, tp)
        sent = sum(_rows_for(by_rank[rank], target, here) for target in range(ep))
        of_tp = [sum(_rows_for(by_rank[source * tp + each], owner, here) for source in range(ep)) for each in range(tp)]
        there_and_back = (sent + of_tp[column]) * row
        routing = sent * (gates + choices)
        forward = {"all_to_all/ep": (4 + counts[0], there_and_back + routing + counts[1])}
        backward = {"all_to_all/ep": (3, there_and_back + of_tp[column] * gates)}
        if "tp" in case.mesh:
            longest = max(of_tp)
            addends = tp * longest * case.accumulator_itemsize  # of one column
            gathered = longest * (row + gates + choices)
            forward |= {
                "all_gather/tp": (3 + counted[0], gathered + counted[1]),
                "reduce_scatter/tp": (1, addends * case.d),
            }
            backward |= {"all_gather/tp": (1, longest * row), "reduce_scatter/tp": (2, addends * (case.d + case.k))}
        costs.append(Cost(forward=forward, backward=backward))
    return costs


def _rows_for(chosen, owner, here):
    """Tokens that have any expert of `owner`."""
    return int((chosen // here == owner).any(-1).sum())


def cost_by_all_gather(scheme, case):
    """All tokens go to all ranks, over tp and then over ep, and their sums back; every rank sends as much."""
    tokens = [len(x) for x in shards(scheme, "experts", case)]
    ep, tp = case.ep, case.mesh.get("tp", 1)
    of_ep = [sum(tokens[owner * tp : (owner + 1) * tp]) for owner in range(ep)]
    axes = {"ep": (ep, max(of_ep))} | ({"tp": (tp, max(tokens))} if "tp" in case.mesh else {})
    wide = case.accumulator_itemsize
    forward, backward = {}, {}
    for axis, (size, longest) in axes.items():
        gathered = longest * (case.d * case.itemsize + case.k * (wide + INT32))
        lengths = (1, INT64) if size > 1 else (0, 0)
        summed, of_gates = size * longest * case.d * wide, size * longest * case.k * wide
        forward[f"all_gather/{axis}"] = (3 + lengths[0], gathered + lengths[1])
        forward[f"reduce_scatter/{axis}"] = (1, summed)
        backward[f"all_gather/{axis}"] = (1, longest * case.d * wide)
        backward[f"reduce_scatter/{axis}"] = (2, summed + of_gates)
    return Cost(forward=forward, backward=backward)


def cost_of_shared(case):
    """Tokens are gathered over tp, and outputs are summed and scattered back."""
    tokens = case.t // case.dp // case.tp
    gathered, scattered = tokens * case.d * case.itemsize, case.tp * tokens * case.d * case.accumulator_itemsize
    lengths = (1, INT64) if case.tp > 1 else (0, 0)
    return Cost(
        forward={"all_gather/tp": (1 + lengths[0], gathered + lengths[1]), "reduce_scatter/tp": (1, scattered)},
        backward={"all_gather/tp": (1, gathered), "reduce_scatter/tp": (1, scattered)},
    )
