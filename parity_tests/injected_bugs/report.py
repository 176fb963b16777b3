"""What a killing run has to say: a table of faults, closing lines, the curve's points, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from parity_tests.injected_bugs.catalogue import WITHOUT_A_COMPONENT
from parity_tests.injected_bugs.runner import NOT_TRIED, Outcome

COLUMNS = ("fault", "kind", "killed by", "scheme", "examples", "values alone", "note", "one shape", "and conduct")


def table(outcomes: Sequence[Outcome]) -> Table:
    """One line for each fault."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in COLUMNS:
        grid.add_column(column, no_wrap=True, justify="right" if column in ("examples", "values alone") else "left")
    for outcome in outcomes:
        lost = not outcome.killed and not outcome.fault.equivalent
        grid.add_row(*cells(outcome), style="red" if lost else "dim" if outcome.fault.equivalent else "")
    return grid


def cells(outcome: Outcome) -> tuple[str, ...]:
    """A fault's line: in the order of COLUMNS."""
    first = outcome.catches[0] if outcome.catches else None
    survived = "equivalent" if outcome.fault.equivalent else "SURVIVED"
    return (
        outcome.fault.name,
        outcome.fault.kind,
        ", ".join(first.oracles) if first else survived,
        first.scheme if first else "-",
        str(outcome.examples or "-"),
        str(outcome.examples_by_value or "-"),
        {"first": "right", "later": "right", None: "-"}.get(outcome.note, "wrong"),
        "killed" if outcome.baseline else "-",
        "killed" if outcome.baseline_conduct else "-",
    )


def counted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those whose fault changes something observable."""
    return [outcome for outcome in outcomes if not outcome.fault.equivalent]


def closing(outcomes: Sequence[Outcome], examples: int) -> list[str]:
    """The figures, in sentences."""
    those = counted(outcomes)
    killed = [outcome for outcome in those if outcome.killed]
    total = len(those)
    by_value = sum(outcome.examples_by_value is not None for outcome in those)
    worded = [outcome for outcome in killed if outcome.fault.expect.partition(":")[2].strip()]
    others = [outcome for outcome in killed if outcome not in worded]
    needed = sorted(outcome.examples or 0 for outcome in killed)
    median = needed[len(needed) // 2] if needed else 0
    seconds = sum(outcome.seconds for outcome in outcomes)
    lines = [
        f"{share(len(killed), total)} killed within {examples} drawn examples of each scheme concerned; "
        f"median {median}, most {max(needed, default=0)} examples; {seconds:.0f} s.",
        f"{share(by_value, total)} by values or failed ranks alone, without the oracles of protocol, cost and hygiene.",
        f"{share(sum(outcome.baseline for outcome in those), total)} by a test of one shape on two ranks, three seeds; "
        f"{share(sum(outcome.baseline_conduct for outcome in those), total)} where it asks all oracles.",
        f"{share(sum(o.note != 'wrong' for o in worded), len(worded))} of the killed for which the catalogue states "
        f"words are told in these words, {sum(o.note == 'first' for o in worded)} by the very first report.",
        f"{share(sum(o.note != 'wrong' for o in others), len(others))} of the other killed are seen by the oracle that "
        "the catalogue names.",
    ]
    lines += [
        f"survived: {outcome.fault.name}: {outcome.fault.survives or 'NOT EXPLAINED'}"
        for outcome in those
        if not outcome.killed
    ]
    lines += [f"equivalent: {o.fault.name}: {o.fault.equivalent}" for o in outcomes if o.fault.equivalent]
    lines += [f"killed although equivalent: {o.fault.name}" for o in outcomes if o.fault.equivalent and o.killed]
    lines += [f"killed although said to survive: {o.fault.name}" for o in those if o.fault.survives and o.killed]
    lines += [f"told otherwise than expected: {o.fault.name}" for o in those if o.note == "wrong"]
    lines += [f"not tried on {name}: {why}" for name, why in NOT_TRIED.items()]
    return lines + [f"no faults of kind {kind}: {why}" for kind, why in WITHOUT_A_COMPONENT.items()]


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.1%})" if whole else "0 of 0"


def curve(outcomes: Sequence[Outcome], examples: int, by_value: bool = False) -> list[float]:
    """Share of the faults killed within 1, 2, ... examples."""
    those = counted(outcomes)
    needed = [o.examples_by_value if by_value else o.examples for o in those]
    return [sum(n is not None and n <= i for n in needed) / max(len(those), 1) for i in range(1, examples + 1)]


def as_json(outcomes: Sequence[Outcome], examples: int) -> str:
    records: list[dict[str, Any]] = [
        {
            **dict(zip(COLUMNS, cells(outcome), strict=True)),
            "expect": outcome.fault.expect,
            "said": outcome.catches[0].words if outcome.catches else None,
            "judged": outcome.judged,
            "source": outcome.fault.source,
            "equivalent": outcome.fault.equivalent,
        }
        for outcome in outcomes
    ]
    return json.dumps({"examples": examples, "closing": closing(outcomes, examples), "faults": records}, indent=2)
