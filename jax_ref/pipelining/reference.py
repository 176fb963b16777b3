"""Pipelines by definition: assignment of layers and stages, schedule costs in closed form, gradient accumulation.

Source: GPipe arXiv 1811.06965; 1F1B and Interleaved1F1B arXiv 2104.04473; LoopedBFS arXiv 2211.05953; zero bubble
arXiv 2401.10241; DualPipeV after arXiv 2412.19437.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

import jax
import numpy as np


def stage_ids_this_rank(pp_rank: int, pp_size: int, num_stages: int, style: str = "loop") -> tuple[int, ...]:
    """The stages of one rank: a column of a table with one row per pass; `v` reverses every second row."""
    rows = np.arange(num_stages).reshape(-1, pp_size)
    if style == "v":
        rows[1::2] = rows[1::2, ::-1].copy()
    return tuple(int(stage) for stage in rows[:, pp_rank])


def layer_counts(num_stages: int, num_layers: int) -> list[int]:
    """The number of layers of each stage, as even as possible, if only layers have a cost."""
    return [len(layers) for layers in np.array_split(np.arange(num_layers), num_stages)]


def dearest_stage_first(num_stages: int, num_layers: int, embed_cost: float, head_cost: float) -> list[int]:
    """The number of layers of each stage, by trying every division.

    The best division has the smallest maximum cost, then the smallest sum of squared costs, then the most layers in
    early stages.
    """

    def sort_key(counts: list[int]) -> tuple:
        costs = [Fraction(count) for count in counts]  # exact: rounding makes or breaks no tie
        costs[0] += Fraction(embed_cost)
        costs[-1] += Fraction(head_cost)
        return max(costs), sum(cost**2 for cost in costs), [-count for count in counts]

    # Every division of the layers into contiguous stages with at least one layer each.
    divisions = combinations(range(1, num_layers), num_stages - 1)
    return min((list(map(int, np.diff((0, *borders, num_layers)))) for borders in divisions), key=sort_key)


def stages_by_search(num_layers: int, layers_per_stage: int, pp_size: int, rounding: str | None) -> int:
    """The smallest number of stages with room for all layers, rounded "up" or "down" to a multiple of pp_size."""
    needed = min(count for count in range(1, num_layers + 1) if count * layers_per_stage >= num_layers)
    multiples = range(0, needed + pp_size, pp_size)
    if rounding == "up":
        return min(count for count in multiples if count >= needed)
    return max(count for count in multiples if count <= needed) if rounding == "down" else needed


FILL_AND_DRAIN = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B")
FILL_ALONE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def idle(name: str, p: int, n: int, v: int, f: int = 1, i: int = 1, w: int = 1) -> int:
    """Idle time of every rank: the time to fill and drain the pipeline, or only to fill it.

    There are p ranks with v chunks each, and n micro-batches. A forward takes f, an input gradient i, a weight gradient
    w; messages take no time. InterleavedZeroBubble, ZBVZeroBubble and DualPipeV have a closed form only for
    f = i = w = 1.

    With fewer micro-batches than ranks, LoopedBFS also waits between chunks for micro-batches that are still on other
    ranks.
    """
    # These schedules compute weight gradients while the pipeline drains, so ranks wait only while it fills.
    if name in FILL_ALONE:
        return p - 1
    between = (v - 1) * max(0, p - n) if name == "LoopedBFS" else 0
    return (p - 1 + between) * (f + i + w)


def bubble(name: str, p: int, n: int, v: int) -> Fraction:
    """Idle time over makespan, for f = i = w = 1: (p - 1) / (vn + p - 1), or (p - 1) / (3vn + p - 1)."""
    lost = idle(name, p, n, v)
    return Fraction(lost, 3 * v * n + lost)


def live_chunks(name: str, p: int, n: int, v: int, rank: int) -> int:
    """The largest number of chunks with activations stored on a rank at one time."""
    return {
        "GPipe": n,
        "1F1B": min(n, p - rank),
        "LoopedBFS": v * n,
        "Interleaved1F1B": min(v * n, 2 * (p - rank - 1) + (v - 1) * p + 1),
    }[name]


def live_bound(name: str, p: int) -> int:
    """The largest number of stored chunks under the other schedules, with two chunks per rank.

    The bound for InterleavedZeroBubble holds if n is a multiple of p.
    """
    return {"InterleavedZeroBubble": 2 * p, "ZBVZeroBubble": 2 * p, "DualPipeV": 2 * p + 1}[name]


def timeline(
    order: Sequence[Sequence[tuple[int, str, int]]],
    placed: Sequence[int],
    forward: jax.Array,
    backward: jax.Array,
    p2p: jax.Array,
    weight: jax.Array,
) -> tuple[dict[tuple[int, str, int], jax.Array], list[jax.Array]]:
    """When each entry of `order` ends, and how long each rank computes.

        start = max(end of the rank's previous entry, arrival)    end = start + duration

    Each row of `order` is one rank's list of (stage, kind, micro-batch); `placed` is the rank of each stage. An input
    from another rank arrives p2p after it was sent, or after it was computed if the order states no messages. A send
    takes no time, and nothing is sent within a rank. A whole backward B takes `backward` + `weight`; its two halves
    take `backward` (I, the input gradient) and `weight` (W, the weight gradient).
    """
    durations = {"F": forward, "B": backward + weight, "I": backward, "W": weight}
    ends: dict[tuple[int, str, int], jax.Array] = {}
    left, free, busy = [list(row) for row in order], [0.0 * p2p] * len(order), [0.0 * p2p] * len(order)
    sends = any(kind.startswith("SEND") for row in order for _, kind, _ in row)
    while any(left):
        done = len(ends)
        for rank, row in enumerate(left):
            while row:
                stage, kind, m = row[0]
                source = stage - 1 if kind == "F" else stage + 1
                start = free[rank]
                if kind in ("F", "B", "I") and 0 <= source < len(placed):
                    is_remote = placed[source] != rank
                    needed = source, f"SEND_{kind.replace('I', 'B')}" if is_remote and sends else kind, m
                    if needed not in ends:
                        break
                    start = jax.numpy.maximum(start, ends[needed] + (p2p if is_remote else 0.0))
                duration = durations[kind][stage] if kind in durations else 0.0
                ends[row.pop(0)] = start + duration
                free[rank], busy[rank] = start + duration, busy[rank] + duration
        if len(ends) == done:
            raise ValueError(f"order: ranks wait for each other in {[row[0] for row in left if row]}")
    return ends, busy


def accumulate(
    loss: Callable[..., jax.Array],
    parameters: Any,
    microbatches: Sequence[tuple[jax.Array, ...]],
    order: Sequence[int] | None = None,
    divisor: int = 1,
) -> tuple[list[jax.Array], Any]:
    """(losses by micro-batch, gradient) of a model without stages.

        g = (1/divisor) sum_k grad loss(parameters, microbatches[order[k]])

    Gradients are added in `order` and divided once; micro-batches may have different lengths.
    """
    order = range(len(microbatches)) if order is None else order
    losses_and_gradients = {m: jax.value_and_grad(loss)(parameters, *microbatches[m]) for m in order}
    # Add in the order of the schedule, since sums of floats depend on the order.
    total = losses_and_gradients[order[0]][1]
    for m in order[1:]:
        total = jax.tree.map(lambda sum_so_far, gradient: sum_so_far + gradient, total, losses_and_gradients[m][1])
    mean = jax.tree.map(lambda x: x / divisor, total)
    return [losses_and_gradients[m][0] for m in range(len(microbatches))], mean
