"""What an order that says what is sent must be: each message sent once and taken once, in the same order on both ends.

Ranks match messages by order alone: two that cross over would hand a micro-batch to the wrong forward, unseen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch_impl.pipelining.action import Action, Order
from torch_impl.pipelining.order_check import OrderFault

Place = tuple[int, int]  # rank, position


def check_communication(order: Order, stage_to_rank: Sequence[int], n_microbatches: int) -> None:
    """Errors: OrderFault for the first action that is missing, doubled, too early, too late or out of turn."""
    places = _places(order)
    for stage, rank in enumerate(stage_to_rank):
        for microbatch in range(n_microbatches):
            for step, sent in ((1, "F"), (-1, "B")):
                if 0 <= stage + step < len(stage_to_rank) and stage_to_rank[stage + step] != rank:
                    _check_message(order, places, stage_to_rank, stage, stage + step, sent, microbatch)
    wanted = set(_messages(stage_to_rank, n_microbatches))
    for action, (rank, position) in places.items():
        if "_" in action.kind and action.microbatch is not None and action not in wanted:
            raise OrderFault(rank, position, f"'{action}' has no other end on another rank; leave it out")
    _check_turns(order, stage_to_rank)
    _check_stage_actions(order, places)


def _places(order: Order) -> dict[Action, Place]:
    """Where each action stands, pairs taken apart. Errors: OrderFault for a message that stands twice."""
    places: dict[Action, Place] = {}
    for rank, actions in enumerate(order):
        for position, action in enumerate(actions):
            for part in action.parts if action else ():
                if part in places and part.microbatch is not None:
                    raise OrderFault(rank, position, f"'{part}' stands for the second time")
                places[part] = (rank, position)
    return places


def _check_message(
    order: Order, places: dict[Action, Place], ranks: Sequence[int], stage: int, to: int, sent: str, microbatch: int
) -> None:
    """One message: made, sent, taken before it is used."""
    send, take = Action(stage, f"SEND_{sent}", microbatch), Action(to, f"RECV_{sent}", microbatch)
    for action, rank in ((send, ranks[stage]), (take, ranks[to])):
        if action not in places:
            raise OrderFault(rank, len(order[rank]), f"the rank ends without '{action}'")
    made, used = _computed_with(places, stage, sent, microbatch), _computed_with(places, to, sent, microbatch)
    if places[send][1] < places[made][1]:
        raise OrderFault(*places[send], f"'{send}' stands before '{made}'")
    if places[used][1] < places[take][1]:
        raise OrderFault(*places[used], f"'{used}' stands before '{take}'")


def _computed_with(places: dict[Action, Place], stage: int, sent: str, microbatch: int) -> Action:
    """The forward, or the backward that has the input gradient."""
    halved = Action(stage, "I", microbatch)
    return halved if sent == "B" and halved in places else Action(stage, sent, microbatch)


def _messages(ranks: Sequence[int], n_microbatches: int) -> Iterator[Action]:
    for stage in range(len(ranks) - 1):
        if ranks[stage] != ranks[stage + 1]:
            for m in range(n_microbatches):
                yield Action(stage, "SEND_F", m)
                yield Action(stage + 1, "RECV_F", m)
                yield Action(stage + 1, "SEND_B", m)
                yield Action(stage, "RECV_B", m)


def _check_turns(order: Order, ranks: Sequence[int]) -> None:
    """Between two ranks the k-th message taken is the k-th one sent."""
    sent: dict[Place, list[Action]] = defaultdict(list)
    taken: dict[Place, list[tuple[Place, Action]]] = defaultdict(list)
    for rank, actions in enumerate(order):
        for position, action in enumerate(actions):
            if action and action.kind in ("SEND_F", "SEND_B"):
                step = 1 if action.kind == "SEND_F" else -1
                to = action.stage + step
                sent[rank, ranks[to]].append(Action(to, f"RECV_{action.kind[-1]}", action.microbatch))
            elif action and action.kind in ("RECV_F", "RECV_B"):
                source = ranks[action.stage - (1 if action.kind == "RECV_F" else -1)]
                taken[source, rank].append(((rank, position), action))
    for pair, wanted in sent.items():
        for ((rank, position), action), due in zip(taken[pair], wanted, strict=True):
            if action != due:
                raise OrderFault(
                    rank, position, f"'{action}' stands where rank {pair[0]} sends what '{due}' takes; put that first"
                )


def _check_stage_actions(order: Order, places: dict[Action, Place]) -> None:
    """A stage is there when it computes, gathered and given up in turn; its gradient is reduced once, at the end."""
    uses_sharding = {action.stage for action in places if action.kind in ("UNSHARD", "RESHARD")}
    for rank, actions in enumerate(order):
        gathered: set[int] = set()
        reduced: set[int] = set()
        for position, action in enumerate(actions):
            for part in action.parts if action else ():
                if part.kind in ("F", "B", "I", "W"):
                    if part.stage in uses_sharding - gathered:
                        raise OrderFault(rank, position, f"'{part}' stands where '{part.stage}UNSHARD' has not been")
                    if part.kind in "BW" and part.stage in reduced:
                        raise OrderFault(rank, position, f"'{part}' stands after '{part.stage}REDUCE_GRAD'")
                elif part.kind == "UNSHARD":
                    if part.stage in gathered:
                        raise OrderFault(
                            rank, position, f"'{part}' stands where stage {part.stage} is gathered already"
                        )
                    gathered.add(part.stage)
                elif part.kind == "RESHARD":
                    if part.stage not in gathered:
                        raise OrderFault(rank, position, f"'{part}' stands where stage {part.stage} is not gathered")
                    gathered.remove(part.stage)
                elif part.kind == "REDUCE_GRAD":
                    if part.stage in reduced:
                        raise OrderFault(rank, position, f"'{part}' stands for the second time")
                    reduced.add(part.stage)
