"""Stages and layers from the definition: arrays of stage numbers, and every cut tried."""

from itertools import combinations

import numpy as np


def stage_ids_this_rank(pp_rank: int, pp_size: int, num_stages: int, style: str = "loop") -> tuple[int, ...]:
    """A row of stages for each pass; under `v` every second row is turned round; a rank has its column."""
    rows = np.arange(num_stages).reshape(-1, pp_size)
    if style == "v":
        rows[1::2] = rows[1::2, ::-1].copy()
    return tuple(int(stage) for stage in rows[:, pp_rank])


def layer_counts(num_stages: int, num_layers: int) -> list[int]:
    """Layers of each stage where only layers cost anything."""
    return [len(layers) for layers in np.array_split(np.arange(num_layers), num_stages)]


def dearest_stage_first(num_stages: int, num_layers: int, embed_cost: float, head_cost: float) -> list[int]:
    """Layers of each stage by trying every cut: the least largest cost, then the least sum of squares of costs, then
    the most layers in front."""

    def judged(counts: list[int]) -> tuple:
        costs = np.array(counts, dtype=np.float64)
        costs[0] += embed_cost
        costs[-1] += head_cost
        return costs.max(), (costs**2).sum(), [-count for count in counts]

    cuts = combinations(range(1, num_layers), num_stages - 1)
    return min((list(map(int, np.diff((0, *cut, num_layers)))) for cut in cuts), key=judged)


def stages_by_search(num_layers: int, layers_per_stage: int, pp_size: int, rounding: str | None) -> int:
    """The least number of stages that holds all layers, or the multiple of pp_size next to it."""
    needed = min(count for count in range(1, num_layers + 1) if count * layers_per_stage >= num_layers)
    multiples = range(0, needed + pp_size, pp_size)
    if rounding == "up":
        return min(count for count in multiples if count >= needed)
    return max(count for count in multiples if count <= needed) if rounding == "down" else needed
