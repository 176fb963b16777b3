"""Orders: the actions that each rank of a pipeline runs, their notation, and the rules of a valid order.

The action `2F5` is the forward of micro-batch 5 on stage 2. Validation raises InvalidOrder for the first wrong action,
with its rank and position; `read_csv` turns these into row and column.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Annotated, NamedTuple

from torch_impl.contract import Instance, ListOf

COMPUTED = ("F", "B", "I", "W")  # forward; full backward; its halves, input gradient and weight gradient
SENT = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
OF_A_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # actions of a sharded stage, without a micro-batch
PAIR = "OVERLAP_F_B"  # a forward and a backward that may run at once; here they run one after the other

_SINGLE = re.compile(rf"(\d{{1,9}})(?:({'|'.join(COMPUTED + SENT)})(\d{{1,9}})|({'|'.join(OF_A_STAGE)}))", re.ASCII)
_PAIR = re.compile(rf"\(([^;()]*);([^;()]*)\){PAIR}")


class Action(NamedTuple):
    """One action of one rank. An overlapped pair has its two actions in `pair`, and stage -1."""

    stage: int
    kind: str
    microbatch: int | None = None
    pair: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.pair:
            return f"({';'.join(map(str, self.pair))}){PAIR}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions that run: this action, or both of a pair."""
        return self.pair or (self,)


# The actions of each rank; None is a step of waiting.
Order = Annotated[
    Sequence[Sequence[Action | None]],
    ListOf(ListOf(Instance((Action, NoneType), "pass an Action, or None"), "actions"), "actions for each rank"),
]


def overlap(first: Action, second: Action) -> Action:
    """A pair of actions that may run at once."""
    return Action(-1, PAIR, None, (first, second))


def parse_action(text: str) -> Action | None:
    """Parse the text of an action; None for a blank text.

    >>> parse_action("2F5"), parse_action(" ")
    (Action(stage=2, kind='F', microbatch=5, pair=()), None)

    Errors: ValueError for a text that is not an action.
    """
    text = text.strip()
    if not text:
        return None
    pair = _PAIR.fullmatch(text)
    if pair:
        inner = [parse_action(part) for part in pair.groups()]
        if all(part is not None and part.kind in COMPUTED for part in inner):
            return overlap(*inner)  # pyright: ignore[reportArgumentType]
    single = _SINGLE.fullmatch(text)
    if not single:
        raise ValueError(
            f"{text!r} is not an action; write <stage><kind><micro-batch>, as 0F3, 1B0, 1I0, 1W0 or 0SEND_F3"
        )
    stage, kind, microbatch, stage_kind = single.groups()
    return Action(int(stage), stage_kind or kind, None if stage_kind else int(microbatch))


def computations(actions: Iterable[Action | None]) -> list[Action]:
    """The forwards and backwards, with pairs split into their two actions."""
    return [part for action in actions if action for part in action.parts if part.kind in COMPUTED]


def has_communication(order: Order) -> bool:
    """Whether an order states sends, gathers or reductions, and not computations only."""
    return any(action and action.kind in SENT + OF_A_STAGE for actions in order for action in actions)


# The kinds of action that must come before a kind, for the same stage and micro-batch.
BEFORE = {"B": ("F",), "I": ("F",), "W": ("I",)}


class InvalidOrder(ValueError):
    """An order that cannot run: the problem, and the rank and position where it occurs (both from 0)."""

    def __init__(self, rank: int, position: int, problem: str) -> None:
        super().__init__(f"order: rank {rank}, position {position}: {problem}")
        self.rank, self.position, self.problem = rank, position, problem


def infer_stage_to_rank(order: Order) -> list[int]:
    """The rank of each stage, taken from its first action. Errors: InvalidOrder unless stages are 0 to S - 1."""
    ranks: dict[int, int] = {}
    first: dict[int, tuple[int, int, Action]] = {}
    for rank, position, action in _positions(order):
        if action.stage not in ranks:
            ranks[action.stage], first[action.stage] = rank, (rank, position, action)
    for stage in range(len(ranks)):
        if stage not in ranks:
            rank, position, action = first[min(other for other in ranks if other > stage)]
            raise InvalidOrder(rank, position, f"'{action}' is of stage {action.stage}, but no rank has stage {stage}")
    return [ranks[stage] for stage in range(len(ranks))]


def check_computed(order: Order, stage_to_rank: Sequence[int] | Mapping[int, int], n_microbatches: int) -> None:
    """Check that each stage computes each micro-batch once on its rank: F, then B or I and W. Errors: InvalidOrder."""
    ranks = dict(enumerate(stage_to_rank)) if isinstance(stage_to_rank, Sequence) else dict(stage_to_rank)
    seen: set[Action] = set()
    for rank, position, action in _positions(order):
        if problem := _placement_problem(action, rank, ranks, n_microbatches) or _out_of_turn(action, seen):
            raise InvalidOrder(rank, position, problem)
        seen.update([action] if action.kind in COMPUTED else [])
    for incomplete in _incomplete(order, ranks, n_microbatches, seen):
        raise incomplete


def check_last_forwards(order: Order, last_stage: int) -> None:
    """Check that the last stage runs its micro-batches in the order of their numbers. Errors: InvalidOrder.

    torch stores losses and outputs in the order of computation, without their numbers.
    """
    locations = [
        location for location in _positions(order) if location[2].stage == last_stage and location[2].kind == "F"
    ]
    for expected, (rank, position, action) in enumerate(locations):
        if action.microbatch != expected:
            earlier = action._replace(microbatch=expected)
            raise InvalidOrder(rank, position, f"'{action}' comes before '{earlier}' on the last stage; put that first")


def _placement_problem(action: Action, rank: int, ranks: Mapping[int, int], n_microbatches: int) -> str | None:
    """Why an action cannot be on a rank at all, or None."""
    if action.stage not in ranks:
        return f"'{action}' is of stage {action.stage}; there are {len(ranks)}"
    if ranks[action.stage] != rank:
        return f"'{action}' is on rank {rank}, but stage {action.stage} is on rank {ranks[action.stage]}"
    if action.microbatch is not None and not 0 <= action.microbatch < n_microbatches:
        return f"'{action}' is of micro-batch {action.microbatch}; there are {n_microbatches}"
    return None


def _out_of_turn(action: Action, seen: set[Action]) -> str | None:
    """Why an action cannot follow the computations in `seen`, or None."""
    if action in seen:
        return f"'{action}' occurs a second time"
    for kind in BEFORE.get(action.kind, ()):
        if action._replace(kind=kind) not in seen:
            return f"'{action}' comes before '{action._replace(kind=kind)}'"
    # A backward is either full or in two halves, never both.
    for kind in {"B": "IW", "I": "B", "W": "B"}.get(action.kind, ""):
        if action._replace(kind=kind) in seen:
            return f"'{action}' occurs beside '{action._replace(kind=kind)}'; write B, or I and W"
    return None


def _incomplete(
    order: Order, ranks: Mapping[int, int], n_microbatches: int, seen: set[Action]
) -> Iterator[InvalidOrder]:
    """Stages on a rank that does not exist, and forwards and backwards that no rank computes."""
    for stage, rank in sorted(ranks.items()):
        if not 0 <= rank < len(order):
            yield InvalidOrder(rank, 0, f"stage {stage} is on rank {rank}; the order has {len(order)}")
        for microbatch in range(n_microbatches):
            # After the input half of a backward, its weight half must follow.
            backward = "W" if Action(stage, "I", microbatch) in seen else "B"
            for kind in ("F", backward):
                missing = Action(stage, kind, microbatch)
                if missing not in seen:
                    yield InvalidOrder(rank, len(order[rank]), f"the rank ends without '{missing}'")


def _positions(order: Order) -> list[tuple[int, int, Action]]:
    """(rank, position, action) of every action, with pairs split into their two actions."""
    return [
        (rank, position, part)
        for rank, actions in enumerate(order)
        for position, action in enumerate(actions)
        if action
        for part in action.parts
    ]


Location = tuple[int, int]  # rank, position


def check_communication(order: Order, stage_to_rank: Sequence[int], n_microbatches: int) -> None:
    """Check that each message is sent once and received once, in the same order on both ranks.

    Ranks match messages by order only: two messages that cross would silently give a forward the wrong micro-batch.

    Errors: InvalidOrder for the first action that is missing, repeated, too early, too late or out of turn.
    """
    for problem in _communication_problems(order, stage_to_rank, n_microbatches):
        raise problem


def _communication_problems(order: Order, ranks: Sequence[int], n_microbatches: int) -> Iterator[InvalidOrder]:
    """The problems of an order's messages. A rule relies on the rules before it, so only the first problem counts."""
    # 1. No message occurs twice.
    locations: dict[Action, Location] = {}
    for rank, position, action in _positions(order):
        if action in locations and action.microbatch is not None:
            yield InvalidOrder(rank, position, f"'{action}' occurs a second time")
        locations[action] = (rank, position)
    # 2. Every message between two ranks is sent after its computation, and received before its use.
    for stage, rank in enumerate(ranks):
        for microbatch in range(n_microbatches):
            for step, sent in ((1, "F"), (-1, "B")):
                if 0 <= stage + step < len(ranks) and ranks[stage + step] != rank:
                    yield from _message_problems(order, locations, ranks, stage, stage + step, sent, microbatch)
    # 3. Nothing else is sent or received.
    messages = set(_messages(ranks, n_microbatches))
    for action, (rank, position) in locations.items():
        if "_" in action.kind and action.microbatch is not None and action not in messages:
            yield InvalidOrder(rank, position, f"'{action}' has no other end on another rank; leave it out")
    # 4. Two ranks have their messages in the same order, and sharded stages are gathered when they compute.
    yield from _crossing_messages(order, ranks)
    # A stage that the order never gathers is not sharded and needs no gathering.
    uses_sharding = {action.stage for action in locations if action.kind in ("UNSHARD", "RESHARD")}
    for rank, actions in enumerate(order):
        yield from _sharding_problems(rank, actions, uses_sharding)


def _message_problems(
    order: Order,
    locations: dict[Action, Location],
    ranks: Sequence[int],
    stage: int,
    to: int,
    sent: str,
    microbatch: int,
) -> Iterator[InvalidOrder]:
    """The problems of one message, which must be computed, then sent, and received, then used."""
    send, receive = Action(stage, f"SEND_{sent}", microbatch), Action(to, f"RECV_{sent}", microbatch)
    for action, rank in ((send, ranks[stage]), (receive, ranks[to])):
        if action not in locations:
            yield InvalidOrder(rank, len(order[rank]), f"the rank ends without '{action}'")
    source, use = (_computation(locations, each, sent, microbatch) for each in (stage, to))
    if locations[send][1] < locations[source][1]:
        yield InvalidOrder(*locations[send], f"'{send}' comes before '{source}'")
    if locations[use][1] < locations[receive][1]:
        yield InvalidOrder(*locations[use], f"'{use}' comes before '{receive}'")


def _computation(locations: dict[Action, Location], stage: int, sent: str, microbatch: int) -> Action:
    """The forward, or the action that computes the input gradient: I if the backward is split, else B."""
    # The weight half neither needs nor produces a message.
    halved = Action(stage, "I", microbatch)
    return halved if sent == "B" and halved in locations else Action(stage, sent, microbatch)


def _messages(ranks: Sequence[int], n_microbatches: int) -> Iterator[Action]:
    """Both ends of every message that a schedule needs."""
    for stage in range(len(ranks) - 1):
        if ranks[stage] != ranks[stage + 1]:
            for m in range(n_microbatches):
                yield Action(stage, "SEND_F", m)
                yield Action(stage + 1, "RECV_F", m)
                yield Action(stage + 1, "SEND_B", m)
                yield Action(stage, "RECV_B", m)


def _crossing_messages(order: Order, ranks: Sequence[int]) -> Iterator[InvalidOrder]:
    """The messages between two ranks that are not received in the order in which they are sent."""
    sent: dict[Location, list[Action]] = defaultdict(list)
    received: dict[Location, list[tuple[int, int, Action]]] = defaultdict(list)
    for rank, position, action in _positions(order):
        step = 1 if action.kind[-1] == "F" else -1
        if action.kind in ("SEND_F", "SEND_B"):
            to = action.stage + step
            # Store the matching receive, so that the two lists can be compared.
            sent[rank, ranks[to]].append(Action(to, f"RECV_{action.kind[-1]}", action.microbatch))
        elif action.kind in ("RECV_F", "RECV_B"):
            received[ranks[action.stage - step], rank].append((rank, position, action))
    for pair, messages in sent.items():
        for (rank, position, action), expected in zip(received[pair], messages, strict=True):
            if action != expected:
                cross = f"'{action}' comes where rank {pair[0]} sends the message of '{expected}'; put that first"
                yield InvalidOrder(rank, position, cross)


def _sharding_problems(rank: int, actions: Sequence[Action | None], uses_sharding: set[int]) -> Iterator[InvalidOrder]:
    """Actions that break a rule of sharded stages: gather before computing; reduce once, after the last backward."""
    gathered: set[int] = set()
    reduced: set[int] = set()
    for _, position, action in _positions([actions]):
        stage, kind = action.stage, action.kind
        rules = (
            (kind in COMPUTED and stage in uses_sharding - gathered, f"comes where stage {stage} is not gathered"),
            (kind in ("B", "W") and stage in reduced, f"comes after '{stage}REDUCE_GRAD'"),
            (kind == "UNSHARD" and stage in gathered, f"comes where stage {stage} is gathered already"),
            (kind == "RESHARD" and stage not in gathered, f"comes where stage {stage} is not gathered"),
            (kind == "REDUCE_GRAD" and stage in reduced, "occurs a second time"),
        )
        for is_broken, problem in rules:
            if is_broken:
                yield InvalidOrder(rank, position, f"'{action}' {problem}")
        if kind in ("UNSHARD", "RESHARD"):
            gathered ^= {stage}
        elif kind == "REDUCE_GRAD":
            reduced.add(stage)
