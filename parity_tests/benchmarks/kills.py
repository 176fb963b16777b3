"""How many of the planted faults are killed: the killing run of parity_tests.injected_bugs, on every sixth fault."""

from __future__ import annotations

from collections.abc import Iterator

from parity_tests.benchmarks.figure import Figure
from parity_tests.injected_bugs import report
from parity_tests.injected_bugs.catalogue import CATALOGUE
from parity_tests.injected_bugs.runner import EXAMPLES, Range, killing_run

PROMISED = 0.95
EVERY = 6  # `make bugs` plants them all
CACHE = ".jax_cache"


def figures() -> Iterator[Figure]:
    outcomes = killing_run(CATALOGUE[::EVERY], Range(cache=CACHE))
    those = report.counted(outcomes)
    killed = [outcome for outcome in those if outcome.killed]
    needed = sorted(outcome.examples or 0 for outcome in killed)
    lost = ", ".join(outcome.fault.name for outcome in those if not outcome.killed)
    yield Figure(
        "faults killed, of those that are not equivalent",
        ">= 95 % of 100 or more",
        report.share(len(killed), len(those)) + (f"; survived: {lost}" if lost else ""),
        len(CATALOGUE) >= 100 and len(killed) >= PROMISED * len(those),
        f"within {EXAMPLES} drawn examples of each scheme concerned; median {needed[len(needed) // 2]}, "
        f"most {needed[-1]}; every sixth of the {len(CATALOGUE)} that the catalogue then had; "
        "faults.md is a run of all",
    )
    yield Figure(
        "the same by a test of one shape on two ranks, three seeds",
        "-",
        f"{report.share(sum(outcome.baseline for outcome in those), len(those))} by values, "
        f"{report.share(sum(outcome.baseline_conduct for outcome in those), len(those))} by all oracles",
        None,
        "the same budgets",
    )
