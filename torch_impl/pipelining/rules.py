"""The seven schedules by name, and what each asks of stages, placement and micro-batches."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass


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
