"""The order in which each rank of a schedule computes, from the schedule's definition; pure Python.

F forward, B whole backward, I and W its halves. What a rank does is a word in letters with the chunk of the rank,
as `F0 F1 I1 W1`; micro-batches are counted off as the word is read.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch_impl.pipelining.arguments import check_positive
from torch_impl.pipelining.order import Action, overlapped
from torch_impl.pipelining.partition import stage_ids_this_rank

NAME = "schedule_order"
Actions = list[Action | None]


def schedule_order(name: str, pp_size: int, n_microbatches: int, stages_per_rank: int) -> list[Actions]:
    """For each rank its actions; None is a step in which it waits.

    >>> [" ".join(map(str, actions)) for actions in schedule_order("1F1B", 2, 2, 1)]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']

    Errors: TypeError for what is no int or str; ValueError for a schedule that there is not, or that cannot have
            these stages or micro-batches.
    Source: GPipe arXiv 1811.06965; 1F1B and Interleaved1F1B arXiv 2104.04473; LoopedBFS arXiv 2211.05953; zero
            bubble arXiv 2401.10241; DualPipeV after arXiv 2412.19437.
    """
    rule = rule_of(NAME, "name", name)
    sizes = {"pp_size": pp_size, "n_microbatches": n_microbatches, "stages_per_rank": stages_per_rank}
    for size, value in sizes.items():
        check_positive(NAME, size, value)
    fault = stages_fault(rule, stages_per_rank)
    if fault:
        raise ValueError(f"pipelining.{NAME}: stages_per_rank={stages_per_rank}, but {fault}")
    fault = microbatches_fault(rule, n_microbatches, pp_size)
    if fault:
        raise ValueError(f"pipelining.{NAME}: n_microbatches={n_microbatches} {fault}")
    orders = [
        _WORDS[rule.name](
            rank, pp_size, n_microbatches, stage_ids_this_rank(rank, pp_size, pp_size * stages_per_rank, rule.style)
        )
        for rank in range(pp_size)
    ]
    return _held_back(orders) if rule.name == "InterleavedZeroBubble" else orders


def _gpipe(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    return _looped(rank, n, stages, range(n))


def _1f1b(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """p - rank forwards ahead, then one backward for each further forward."""
    ahead = min(n, p - rank)
    forwards = [Action(stages[0], "F", m) for m in range(n)]
    backwards = [Action(stages[0], "B", m) for m in range(n)]
    return [*forwards[:ahead], *_alternated(backwards, forwards[ahead:])]


def _looped_bfs(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """All micro-batches of a stage, stage after stage; back in the reverse of everything."""
    order = _looped(rank, n, stages, range(n - 1, -1, -1))
    middle = n * len(stages)
    return [*[None] * rank, *order[:middle], *[None] * (2 * (p - 1 - rank)), *order[middle:]]


def _looped(rank: int, n: int, stages: tuple[int, ...], backwards: Iterable[int]) -> Actions:
    back = list(backwards)
    return [
        *(Action(stage, "F", m) for stage in stages for m in range(n)),
        *(Action(stage, "B", m) for stage in reversed(stages) for m in back),
    ]


def _interleaved(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """Rounds of about p micro-batches through one stage after the other; forwards ahead for the way there and back."""
    forwards = _rounds("F", p, n, stages)
    backwards = _rounds("B", p, n, tuple(reversed(stages)))
    ahead = _ahead(rank, p, n, len(stages), 2)
    wait = [None] * (len(stages) * p + 2 * (p - 1 - rank) - ahead - rank) if ahead else []
    steady = len(backwards) - ahead
    return [
        *[None] * rank,
        *forwards[:ahead],
        *wait,
        *_alternated(forwards[ahead:], backwards[:steady]),
        *(each for action in backwards[steady:] for each in (None, action)),
    ]


def _interleaved_zero_bubble(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """As interleaved, with half as many ahead; weight gradients follow `rank` backwards later and fill what waits."""
    forwards = _rounds("F", p, n, stages)
    inputs, weights = (_rounds(kind, p, n, tuple(reversed(stages))) for kind in "IW")
    ahead = _ahead(rank, p, n, len(stages), 1)
    order: Actions = [*[None] * rank, *forwards[:ahead], *([None] * (p - rank - 1) if ahead else [])]
    for k, action in enumerate(inputs):
        order += [
            *forwards[ahead + k : ahead + k + 1],
            action,
            *(weights[k - rank : k - rank + 1] if k >= rank else []),
        ]
    return order + list(weights[max(0, len(weights) - rank) :])


def _rounds(kind: str, p: int, n: int, stages: tuple[int, ...]) -> list[Action]:
    """Micro-batches of a round pass each stage before the next round starts."""
    rounds = max(1, n // p)
    size = n // rounds
    return [Action(stage, kind, q * size + m) for q in range(rounds) for stage in stages for m in range(size)]


def _ahead(rank: int, p: int, n: int, v: int, for_each_hop: int) -> int:
    """Forwards before the first backward."""
    size = n // max(1, n // p)
    return min((v - 1) * size + for_each_hop * (p - 1 - rank), n * v)


def _zbv(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """The first chunk goes down, the second comes up; each backward is cut, and weight gradients wait at the end.

    Below 2p - 1 micro-batches the order is that of 2p - 1 with the others left out.
    """
    whole = max(2 * p - 1, n)
    turns = whole - p
    word = ["F0"] * (2 * (p - rank) - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * (p - rank)
    for turn in range(turns):
        word += [*(["F0"] if turn <= turns - p + rank else []), "I0", "W0", "F1", "I1", "W1"]
    word += ["I0", "I1"] * rank + ["I0", "W0"] * (p - rank) + ["W1"] * rank + ["W0"] * rank
    return [None] * rank + [action if action.microbatch < n else None for action in _counted(word, stages)]  # pyright: ignore[reportOptionalOperand]


def _dualpipev(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """Forwards of one chunk run with backwards of the other; from the middle of the last backwards on they are cut."""
    hops = p - 1 - rank
    word = ["F0"] * (2 * hops) + ["F0", "F1"] * (rank + 1) + ["I1", "W", "F1"] * hops
    for turn in range(n - 2 * p + rank + 1):
        word += ["F0", "B1"] if turn == 0 and rank == p - 1 else ["F0+B1"]
        word += ["F1+B0"]
    word += ["B1", "F1+B0"] * hops
    last = ["1", "0"] * (rank + 1)
    word += [f"{'B' if k <= rank else 'I'}{chunk}" for k, chunk in enumerate(last)]
    return list(_counted(word + ["W", "I0"] * hops + ["W"] * (rank + 1), stages))


def _counted(word: Iterable[str], stages: tuple[int, ...]) -> list[Action]:
    """Actions of a word. Each letter of a chunk has the next micro-batch; `W` alone is the oldest that is owed."""
    counts: Counter[str] = Counter()
    owed: list[Action] = []

    def action(letter: str) -> Action:
        if letter == "W":
            return owed.pop(0)
        kind, chunk = letter[0], int(letter[1])
        counter = ("B" if kind == "I" else kind) + letter[1]
        counts[counter] += 1
        if kind == "I":
            owed.append(Action(stages[chunk], "W", counts[counter] - 1))
        return Action(stages[chunk], kind, counts[counter] - 1)

    return [
        overlapped(*(action(part) for part in letter.split("+"))) if "+" in letter else action(letter)
        for letter in word
    ]


def _alternated(first: list[Action], second: list[Action]) -> list[Action]:
    """One of each in turn; what the longer one has over comes last."""
    both = [action for pair in zip(first, second, strict=False) for action in pair]
    common = len(both) // 2
    return both + first[common:] + second[common:]


def _held_back(orders: list[Actions]) -> list[Actions]:
    """Steps of waiting put in before forwards whose input no rank has made in an earlier step."""
    done: set[Action] = set()
    held: list[Actions] = [[] for _ in orders]
    places = [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        made: set[Action] = set()
        for rank, order in enumerate(orders):
            if places[rank] == len(order):
                continue
            action = order[places[rank]]
            needs = action._replace(stage=action.stage - 1) if action and action.kind == "F" and action.stage else None
            if needs and needs not in done:
                held[rank].append(None)
                continue
            held[rank].append(action)
            made |= {action} if action else set()
            places[rank] += 1
        done |= made
    return held


_WORDS: dict[str, Callable[[int, int, int, tuple[int, ...]], Actions]] = {
    "GPipe": _gpipe,
    "1F1B": _1f1b,
    "LoopedBFS": _looped_bfs,
    "Interleaved1F1B": _interleaved,
    "InterleavedZeroBubble": _interleaved_zero_bubble,
    "ZBVZeroBubble": _zbv,
    "DualPipeV": _dualpipev,
}


@dataclass(frozen=True)
class Rule:
    """`stages` on each rank, None for any number; `accepts` asks (n, p) of the micro-batches, `wants` says it."""

    name: str
    style: str
    stages: int | None
    wants: str = "n >= 1"
    accepts: Callable[[int, int], bool] = lambda n, p: n >= 1

    @property
    def is_single(self) -> bool:
        """One stage on each rank."""
        return self.stages == 1


def _in_rounds(n: int, p: int) -> bool:
    return n >= 1 and n % max(1, n // p) == 0


RULES = {
    rule.name: rule
    for rule in (
        Rule("GPipe", "loop", 1),
        Rule("1F1B", "loop", 1, "n >= pp_size", lambda n, p: n >= p),
        Rule("LoopedBFS", "loop", None),
        Rule("Interleaved1F1B", "loop", None, "n % max(1, n // pp_size) == 0", _in_rounds),
        Rule("InterleavedZeroBubble", "loop", None, "n % max(1, n // pp_size) == 0", _in_rounds),
        Rule("ZBVZeroBubble", "v", 2),
        Rule("DualPipeV", "v", 2, "n >= 2 * pp_size", lambda n, p: n >= 2 * p),
    )
}


def rule_of(function: str, argument: str, name: object) -> Rule:
    """The rule of a schedule, in whatever case its name is written. Errors: TypeError; ValueError with the nearest."""
    if not isinstance(name, str):
        raise TypeError(
            f"pipelining.{function}: {argument}={name!r} is a {type(name).__name__}; pass a schedule's name"
        )
    known = {each.lower(): rule for each, rule in RULES.items()}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, 1, 0.0)
        raise ValueError(
            f"pipelining.{function}: {argument}={name!r} is not known; nearest: {known[near[0]].name!r} "
            f"(known: {', '.join(RULES)})"
            if near
            else f"pipelining.{function}: {argument}={name!r} is not known; use one of {', '.join(RULES)}"
        )
    return known[name.lower()]


def stages_fault(rule: Rule, stages_per_rank: int) -> str | None:
    """Why a schedule cannot have so many stages on each rank, or None."""
    if rule.stages is None or rule.stages == stages_per_rank:
        return None
    return f"{rule.name} has exactly {rule.stages} on each rank; use {rule.stages}"


def microbatches_fault(rule: Rule, n_microbatches: int, pp_size: int) -> str | None:
    """Why a schedule cannot have so many micro-batches, or None; with the next number that it can have."""
    if rule.accepts(n_microbatches, pp_size):
        return None
    larger = next(n for n in range(max(1, n_microbatches), 4 * (pp_size + n_microbatches)) if rule.accepts(n, pp_size))
    return f"cannot be cut by {rule.name} over pp_size={pp_size} ({rule.wants}); use {larger}"
