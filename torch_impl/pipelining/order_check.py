"""What an order must be, so that each micro-batch passes each stage once, forward and back; the first fault is told.

Nothing here knows files: a fault has a rank and a position, and who asks says how these are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_impl.pipelining.action import COMPUTED, Action, Order

BEFORE = {"B": ("F",), "I": ("F",), "W": ("I",)}  # what must stand before, of the same stage and micro-batch


class OrderFault(ValueError):
    """A fault of an order: what is wrong, on which rank, at which position (both from 0)."""

    def __init__(self, rank: int, position: int, what: str) -> None:
        super().__init__(f"order: rank {rank}, position {position}: {what}")
        self.rank, self.position, self.what = rank, position, what


def inferred_stage_to_rank(order: Order) -> list[int]:
    """The rank of each stage, by where its first action stands. Errors: OrderFault unless stages are 0 to S - 1."""
    ranks: dict[int, int] = {}
    first: dict[int, tuple[int, int, Action]] = {}
    for rank, position, action in _listed(order):
        if action.stage not in ranks:
            ranks[action.stage], first[action.stage] = rank, (rank, position, action)
    for stage in range(len(ranks)):
        if stage not in ranks:
            rank, position, action = first[min(other for other in ranks if other > stage)]
            raise OrderFault(rank, position, f"'{action}' is of stage {action.stage}, but no rank has stage {stage}")
    return [ranks[stage] for stage in range(len(ranks))]


def check_computed(order: Order, stage_to_rank: Sequence[int] | Mapping[int, int], n_microbatches: int) -> None:
    """Each stage on its rank sees each micro-batch once: F, then B or I and W. Errors: OrderFault for the first."""
    ranks = dict(enumerate(stage_to_rank)) if isinstance(stage_to_rank, Sequence) else dict(stage_to_rank)
    seen: dict[Action, tuple[int, int]] = {}
    for rank, position, action in _listed(order):
        _check_place(rank, position, action, ranks, n_microbatches)
        if action.kind not in COMPUTED:
            continue
        if action in seen:
            raise OrderFault(rank, position, f"'{action}' stands for the second time")
        for kind in BEFORE.get(action.kind, ()):
            needed = action._replace(kind=kind)
            if needed not in seen:
                raise OrderFault(rank, position, f"'{action}' stands before '{needed}'")
        for kind in {"B": "IW", "I": "B", "W": "B"}.get(action.kind, ""):
            if action._replace(kind=kind) in seen:
                raise OrderFault(
                    rank, position, f"'{action}' stands beside '{action._replace(kind=kind)}'; write B, or I and W"
                )
        seen[action] = (rank, position)
    _check_complete(order, ranks, n_microbatches, seen)


def check_last_forwards(order: Order, last_stage: int) -> None:
    """The last stage takes micro-batches as they are numbered: torch keeps losses and outputs in that order, unnamed.

    Errors: OrderFault.
    """
    due = 0
    for rank, position, action in _listed(order):
        if action.stage == last_stage and action.kind == "F":
            if action.microbatch != due:
                wanted = action._replace(microbatch=due)
                raise OrderFault(
                    rank, position, f"'{action}' stands before '{wanted}' on the last stage; put that first"
                )
            due += 1


def _check_place(rank: int, position: int, action: Action, ranks: Mapping[int, int], n_microbatches: int) -> None:
    if action.stage not in ranks:
        raise OrderFault(rank, position, f"'{action}' is of stage {action.stage}; there are {len(ranks)}")
    if ranks[action.stage] != rank:
        raise OrderFault(
            rank,
            position,
            f"'{action}' stands on rank {rank}, but stage {action.stage} is on rank {ranks[action.stage]}",
        )
    if action.microbatch is not None and not 0 <= action.microbatch < n_microbatches:
        raise OrderFault(
            rank, position, f"'{action}' is of micro-batch {action.microbatch}; there are {n_microbatches}"
        )


def _check_complete(
    order: Order, ranks: Mapping[int, int], n_microbatches: int, seen: Mapping[Action, tuple[int, int]]
) -> None:
    for stage, rank in sorted(ranks.items()):
        if not 0 <= rank < len(order):
            raise OrderFault(rank, 0, f"stage {stage} is on rank {rank}; the order has {len(order)}")
        for microbatch in range(n_microbatches):
            backward = "W" if Action(stage, "I", microbatch) in seen else "B"
            for kind in ("F", backward):
                if Action(stage, kind, microbatch) not in seen:
                    missing = Action(stage, kind, microbatch)
                    raise OrderFault(rank, len(order[rank]), f"the rank ends without '{missing}'")


def _listed(order: Order) -> list[tuple[int, int, Action]]:
    return [
        (rank, position, part)
        for rank, actions in enumerate(order)
        for position, action in enumerate(actions)
        if action
        for part in action.parts
    ]
