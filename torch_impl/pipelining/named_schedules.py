"""The seven named schedules: their rules for stages and micro-batches, and the order of each rank's actions.

F is a forward, B a full backward, I and W its halves. A rank's order is a word of these letters, each followed by a
chunk (the index of a stage on the rank), such as `F0 F1 I1 W1`; micro-batches are numbered while the word is read. Pure
Python: nothing here loads torch.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch_impl.contract import PositiveInt, Rejected, contract
from torch_impl.pipelining.order import Action, overlap
from torch_impl.pipelining.partition import Style, stage_ids

Actions = list[Action | None]


@dataclass(frozen=True)
class Rule:
    """A schedule's rules: `stages` on each rank (None: any number), and `accepts(n, p)` for n micro-batches on p ranks.

    `requirement` is the text of `accepts`. With `splits_backward` input and weight gradients are separate actions.
    """

    name: str
    style: Style
    stages: int | None
    requirement: str = "n >= 1"
    accepts: Callable[[int, int], bool] = lambda n, p: n >= 1
    splits_backward: bool = False

    @property
    def is_single(self) -> bool:
        """Whether each rank has one stage."""
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
        Rule("InterleavedZeroBubble", "loop", None, "n % max(1, n // pp_size) == 0", _in_rounds, True),
        Rule("ZBVZeroBubble", "v", 2, splits_backward=True),
        Rule("DualPipeV", "v", 2, "n >= 2 * pp_size", lambda n, p: n >= 2 * p, True),
    )
}


def rule_of(argument: str, name: str) -> Rule:
    """The rule of a schedule, by its name in any case. `argument` is in the message.

    Errors: Rejected with the nearest name for an unknown one.
    """
    rules = {each.lower(): rule for each, rule in RULES.items()}
    if name.lower() not in rules:
        nearest = difflib.get_close_matches(name.lower(), rules, 1, 0.0)
        raise Rejected(
            f"{argument}={name!r} is not a schedule; nearest: {rules[nearest[0]].name!r} "
            f"(schedules: {', '.join(RULES)})"
            if nearest
            else f"{argument}={name!r} is not a schedule; use one of {', '.join(RULES)}"
        )
    return rules[name.lower()]


def stages_problem(rule: Rule, stages_per_rank: int) -> str | None:
    """Why a schedule cannot have this number of stages on each rank, or None if it can."""
    if rule.stages is None or rule.stages == stages_per_rank:
        return None
    return f"{rule.name} has exactly {rule.stages} on each rank; use {rule.stages}"


def microbatches_problem(rule: Rule, n_microbatches: int, pp_size: int) -> str | None:
    """Why a schedule cannot have this number of micro-batches, and the next larger one that works; None if it can."""
    if rule.accepts(n_microbatches, pp_size):
        return None
    larger = next(n for n in range(max(1, n_microbatches), 4 * (pp_size + n_microbatches)) if rule.accepts(n, pp_size))
    return f"cannot be scheduled by {rule.name} over pp_size={pp_size} ({rule.requirement}); use {larger}"


@contract
def schedule_order(
    name: str, pp_size: PositiveInt, n_microbatches: PositiveInt, stages_per_rank: PositiveInt
) -> list[Actions]:
    """The actions of each rank in order; None is a step of waiting.

    >>> [" ".join(map(str, actions)) for actions in schedule_order("1F1B", 2, 2, 1)]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']

    Errors: TypeError for a wrong type; ValueError for an unknown schedule, or a schedule that cannot have these stages
            or micro-batches.
    Source: GPipe arXiv 1811.06965; 1F1B and Interleaved1F1B arXiv 2104.04473; LoopedBFS arXiv 2211.05953; zero
            bubble arXiv 2401.10241; DualPipeV after arXiv 2412.19437.
    """
    rule = rule_of("name", name)
    problem = stages_problem(rule, stages_per_rank)
    if problem:
        raise Rejected(f"stages_per_rank={stages_per_rank}, but {problem}")
    problem = microbatches_problem(rule, n_microbatches, pp_size)
    if problem:
        raise Rejected(f"n_microbatches={n_microbatches} {problem}")
    orders = [
        _WORDS[rule.name](
            rank, pp_size, n_microbatches, stage_ids(rank, pp_size, pp_size * stages_per_rank, rule.style)
        )
        for rank in range(pp_size)
    ]
    return _with_waits(orders) if rule.name == "InterleavedZeroBubble" else orders


def _gpipe(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    return _looped(n, stages, range(n))


def _1f1b(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """p - rank forwards, then one backward and one forward in turn."""
    ahead = min(n, p - rank)
    forwards = [Action(stages[0], "F", m) for m in range(n)]
    backwards = [Action(stages[0], "B", m) for m in range(n)]
    return [*forwards[:ahead], *_alternate(backwards, forwards[ahead:])]


def _looped_bfs(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """All micro-batches of one stage, then all of the next; the backwards in exactly the reverse order."""
    order = _looped(n, stages, range(n - 1, -1, -1))
    middle = n * len(stages)
    return [*[None] * rank, *order[:middle], *[None] * (2 * (p - 1 - rank)), *order[middle:]]


def _looped(n: int, stages: tuple[int, ...], backwards: Iterable[int]) -> Actions:
    backward_microbatches = list(backwards)
    return [
        *(Action(stage, "F", m) for stage in stages for m in range(n)),
        *(Action(stage, "B", m) for stage in reversed(stages) for m in backward_microbatches),
    ]


def _interleaved(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """Rounds of about p micro-batches pass each stage in turn, with two forwards ahead for each later rank."""
    # 1. Both directions run in rounds; the backwards visit the stages in reverse.
    forwards = _rounds("F", p, n, stages)
    backwards = _rounds("B", p, n, tuple(reversed(stages)))
    # 2. Warm-up: forwards until the first gradient can arrive, then waits until it does.
    ahead = _ahead(rank, p, n, len(stages), 2)
    wait = [None] * (len(stages) * p + 2 * (p - 1 - rank) - ahead - rank) if ahead else []
    steady = len(backwards) - ahead
    return [
        *[None] * rank,
        *forwards[:ahead],
        *wait,
        # 3. Steady state: one forward, one backward.
        *_alternate(forwards[ahead:], backwards[:steady]),
        # 4. Cool-down: the remaining backwards, each after a wait for its gradient from another rank.
        *(each for action in backwards[steady:] for each in (None, action)),
    ]


def _interleaved_zero_bubble(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """Interleaved with one forward ahead for each later rank; backwards are split, and W fills the waits."""
    # 1. Both halves of the backward visit the stages in reverse.
    forwards = _rounds("F", p, n, stages)
    inputs, weights = (_rounds(kind, p, n, tuple(reversed(stages))) for kind in "IW")
    # 2. Warm-up.
    ahead = _ahead(rank, p, n, len(stages), 1)
    order: Actions = [*[None] * rank, *forwards[:ahead], *([None] * (p - rank - 1) if ahead else [])]
    # 3. Each input gradient follows a forward; its weight gradient comes `rank` input gradients later.
    for k, action in enumerate(inputs):
        order += [
            *forwards[ahead + k : ahead + k + 1],
            action,
            *(weights[k - rank : k - rank + 1] if k >= rank else []),
        ]
    # 4. The last `rank` weight gradients.
    return order + list(weights[max(0, len(weights) - rank) :])


def _rounds(kind: str, p: int, n: int, stages: tuple[int, ...]) -> list[Action]:
    """The micro-batches of a round pass every stage before the next round starts."""
    rounds = max(1, n // p)
    size = n // rounds
    return [Action(stage, kind, q * size + m) for q in range(rounds) for stage in stages for m in range(size)]


def _ahead(rank: int, p: int, n: int, v: int, per_rank: int) -> int:
    """The number of forwards before the first backward: one round for each stage but one, `per_rank` per later rank."""
    size = n // max(1, n // p)
    return min((v - 1) * size + per_rank * (p - 1 - rank), n * v)


def _zbv(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """Chunk 0 goes down the ranks, chunk 1 comes back up. Every backward is split; the last W wait until the end.

    With fewer than 2p - 1 micro-batches the order for 2p - 1 is used, with waits in place of the missing
    micro-batches.
    """
    rounded_n = max(2 * p - 1, n)
    turns = rounded_n - p
    # 1. Warm-up: forwards until the first micro-batch has gone down to the last rank and come back.
    word = ["F0"] * (2 * (p - rank) - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * (p - rank)
    # 2. Steady state: a forward and a split backward of both chunks.
    for turn in range(turns):
        word += [*(["F0"] if turn <= turns - p + rank else []), "I0", "W0", "F1", "I1", "W1"]
    # 3. Cool-down: input gradients first, since other ranks wait for them, then the weight gradients.
    word += ["I0", "I1"] * rank + ["I0", "W0"] * (p - rank) + ["W1"] * rank + ["W0"] * rank
    return [None] * rank + [action if action.microbatch < n else None for action in _number_microbatches(word, stages)]  # pyright: ignore[reportOptionalOperand]


def _dualpipev(rank: int, p: int, n: int, stages: tuple[int, ...]) -> Actions:
    """Forwards of one chunk overlap with backwards of the other; backwards are split where ranks would wait."""
    ranks_after = p - 1 - rank
    # 1. Warm-up: forwards of chunk 0, then of both, then split backwards of chunk 1.
    word = ["F0"] * (2 * ranks_after) + ["F0", "F1"] * (rank + 1) + ["I1", "W", "F1"] * ranks_after
    # 2. Steady state: overlapped pairs. On the last rank the first pair runs one action after the other.
    for turn in range(n - 2 * p + rank + 1):
        word += ["F0", "B1"] if turn == 0 and rank == p - 1 else ["F0+B1"]
        word += ["F1+B0"]
    # 3. Cool-down: full backwards, from the middle on split ones, then the remaining weight gradients.
    word += ["B1", "F1+B0"] * ranks_after
    chunks = ["1", "0"] * (rank + 1)
    word += [f"{'B' if k <= rank else 'I'}{chunk}" for k, chunk in enumerate(chunks)]
    return list(_number_microbatches(word + ["W", "I0"] * ranks_after + ["W"] * (rank + 1), stages))


def _number_microbatches(word: Iterable[str], stages: tuple[int, ...]) -> list[Action]:
    """The actions of a word: a letter takes the next micro-batch of its chunk, a bare `W` the oldest pending one."""
    counts: Counter[str] = Counter()
    pending_weights: list[Action] = []

    def action(letter: str) -> Action:
        if letter == "W":
            return pending_weights.pop(0)
        kind, chunk = letter[0], int(letter[1])
        counter = ("B" if kind == "I" else kind) + letter[1]  # B and I are counted together: both are backwards
        counts[counter] += 1
        if kind == "I":
            pending_weights.append(Action(stages[chunk], "W", counts[counter] - 1))
        return Action(stages[chunk], kind, counts[counter] - 1)

    return [
        overlap(*(action(part) for part in letter.split("+"))) if "+" in letter else action(letter) for letter in word
    ]


def _alternate(first: list[Action], second: list[Action]) -> list[Action]:
    """One action of each list in turn, then the rest of the longer list."""
    both = [action for pair in zip(first, second, strict=False) for action in pair]
    common = len(both) // 2
    return both + first[common:] + second[common:]


def _with_waits(orders: list[Actions]) -> list[Actions]:
    """Insert a wait before each forward until another rank has computed its input in an earlier step."""
    done: set[Action] = set()
    delayed: list[Actions] = [[] for _ in orders]
    next_index = [0] * len(orders)
    while any(index < len(order) for index, order in zip(next_index, orders, strict=True)):
        step: set[Action] = set()  # the actions of this step, whose results other ranks can use in the next one
        for rank, order in enumerate(orders):
            if next_index[rank] == len(order):
                continue
            action = order[next_index[rank]]
            source = action._replace(stage=action.stage - 1) if action and action.kind == "F" and action.stage else None
            if source and source not in done:
                delayed[rank].append(None)
                continue
            delayed[rank].append(action)
            step |= {action} if action else set()
            next_index[rank] += 1
        done |= step
    return delayed


_WORDS: dict[str, Callable[[int, int, int, tuple[int, ...]], Actions]] = {
    "GPipe": _gpipe,
    "1F1B": _1f1b,
    "LoopedBFS": _looped_bfs,
    "Interleaved1F1B": _interleaved,
    "InterleavedZeroBubble": _interleaved_zero_bubble,
    "ZBVZeroBubble": _zbv,
    "DualPipeV": _dualpipev,
}
