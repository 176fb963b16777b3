"""docs/faults.md and its figure, written from a killing run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from parity_tests.harness.report.colours import LINES
from parity_tests.injected_bugs import report
from parity_tests.injected_bugs.runner import Outcome

HEAD = """# Planted faults

A test suite is worth what it catches. `parity_tests/injected_bugs/` is a catalogue of bugs, written by hand, that are
planted one at a time in our own components, in memory; the tree is never written. Every fault must be caught by an
oracle, and told in the right words, by the same drawn examples that the parity tests judge. Every fourth example stands
inside sub-groups of a larger world.

Beside it stands a test as it is often written: two ranks, one shape, equal shards, float32, three seeds, the same
budgets. *One shape* counts its values and failed ranks, *and conduct* also the oracles of protocol, cost and hygiene.
*Examples* is how many drawn examples of the scheme it took; *values alone* how many without those three oracles.

Written by `make bugs`{stamp}.

![Share of faults killed by number of drawn examples]({figure})

{closing}
"""


def write(outcomes: Sequence[Outcome], examples: int, folder: Path) -> Path:
    """Write the page and the figure; returns the page's path."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    figure(outcomes, examples, folder / "images" / "faults.png")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "hypothesis"))
    stamp = f" on {date.today().isoformat()} with Python {platform.python_version()}, {versions}"
    lines = "\n".join(f"- {line}" for line in report.closing(outcomes, examples))
    text = HEAD.format(stamp=stamp, figure="images/faults.png", closing=lines)
    for component, those in groupby(sorted(outcomes, key=_component), key=_component):
        text += f"\n## {component}\n\n" + _table(list(those))
    path = folder / "faults.md"
    path.write_text(text)
    return path


def figure(outcomes: Sequence[Outcome], examples: int, path: Path) -> None:
    """The curve: share killed within so many examples, and the two baselines as lines."""
    from matplotlib.figure import Figure

    those = report.counted(outcomes)
    canvas = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = canvas.subplots()
    at = range(1, examples + 1)
    axes.step(at, report.curve(outcomes, examples), where="post", color=LINES[0], label="drawn examples, four oracles")
    alone = report.curve(outcomes, examples, by_value=True)
    axes.step(at, alone, where="post", color=LINES[1], label="drawn examples, values alone")
    for name, attribute, style in (
        ("one shape, four oracles", "baseline_conduct", "--"),
        ("one shape, values alone", "baseline", ":"),
    ):
        height = sum(getattr(outcome, attribute) for outcome in those) / max(len(those), 1)
        axes.axhline(height, linestyle=style, color="gray", label=f"{name}, three seeds")
    axes.set(
        xlabel="drawn examples of each scheme", ylabel="share of faults killed", ylim=(0, 1.03), xlim=(1, examples)
    )
    axes.legend(loc="lower right", fontsize="small")
    canvas.savefig(path, dpi=120, metadata={"Software": None})


def _component(outcome: Outcome) -> str:
    return outcome.fault.component


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = [report.COLUMNS, ("---",) * len(report.COLUMNS), *map(_cells, outcomes)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    name, *rest = report.cells(outcome)
    return (f"{name} ({outcome.fault.source})" if outcome.fault.source else name, *rest)
