"""One action of one rank in a schedule, and how it is written: `2F5` is the forward of micro-batch 5 on stage 2."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

COMPUTED = ("F", "B", "I", "W")  # forward; backward, whole or as input gradient and weight gradient
SENT = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
OF_A_STAGE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # of a sharded stage, of no micro-batch
PAIR = "OVERLAP_F_B"  # a forward and a backward that may run at once; here one after the other

_SINGLE = re.compile(rf"(\d{{1,9}})(?:({'|'.join(COMPUTED + SENT)})(\d{{1,9}})|({'|'.join(OF_A_STAGE)}))", re.ASCII)
_PAIR = re.compile(rf"\(([^;()]*);([^;()]*)\){PAIR}")


class Action(NamedTuple):
    """`pair` holds the two of an overlapped pair, whose own stage is -1."""

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
        """The actions that run: itself, or those of a pair."""
        return self.pair or (self,)


Order = Sequence[Sequence[Action | None]]  # for each rank its actions; None is a step of waiting


def overlapped(first: Action, second: Action) -> Action:
    """Two actions as one."""
    return Action(-1, PAIR, None, (first, second))


def parsed(text: str) -> Action | None:
    """An action of its text, None of blanks.

    >>> parsed("2F5"), parsed(" ")
    (Action(stage=2, kind='F', microbatch=5, pair=()), None)

    Errors: ValueError for text that is no action.
    """
    text = text.strip()
    if not text:
        return None
    pair = _PAIR.fullmatch(text)
    if pair:
        inner = [parsed(part) for part in pair.groups()]
        if all(part is not None and part.kind in COMPUTED for part in inner):
            return overlapped(*inner)  # pyright: ignore[reportArgumentType]
    single = _SINGLE.fullmatch(text)
    if not single:
        raise ValueError(f"{text!r} is no action; write <stage><kind><micro-batch>, as 0F3, 1B0, 1I0, 1W0 or 0SEND_F3")
    stage, kind, microbatch, of_stage = single.groups()
    return Action(int(stage), of_stage or kind, None if of_stage else int(microbatch))


def computed(actions: Iterable[Action | None]) -> list[Action]:
    """Forwards and backwards alone, pairs taken apart."""
    return [part for action in actions if action for part in action.parts if part.kind in COMPUTED]


def has_communication(order: Order) -> bool:
    """Whether an order says what is sent, gathered or reduced, and not only what is computed."""
    return any(action and action.kind in SENT + OF_A_STAGE for actions in order for action in actions)
