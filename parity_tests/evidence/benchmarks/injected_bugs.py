"""How many injected bugs are caught: a run of parity_tests.evidence.injected_bugs on every tenth bug."""

from __future__ import annotations

from collections.abc import Iterator

from parity_tests.evidence.benchmarks.figure import Figure
from parity_tests.evidence.injected_bugs import report
from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.runner import EXAMPLES, BugRunner, run_bugs
from parity_tests.evidence.page import share

PROMISED, LEAST = 0.95, 100  # of at least so many bugs
EVERY = 10  # `make bugs` injects them all
CACHE = ".jax_cache"


def figures() -> Iterator[Figure]:
    outcomes = run_bugs(CATALOGUE[::EVERY], BugRunner(cache=CACHE))
    counted = report.counted(outcomes)
    caught = [outcome for outcome in counted if outcome.caught]
    needed = sorted(outcome.examples or 0 for outcome in caught)
    lost = ", ".join(outcome.bug.name for outcome in counted if not outcome.caught)
    yield Figure(
        "injected bugs caught, of those that are not equivalent",
        f">= {100 * PROMISED:g} % of {LEAST} or more",
        share(len(caught), len(counted)) + (f"; survived: {lost}" if lost else ""),
        len(caught) >= PROMISED * len(counted) if len(counted) >= LEAST else None,
        f"within {EXAMPLES} drawn examples of each affected scheme; median {needed[len(needed) // 2]}, "
        f"most {needed[-1]}; every {EVERY}th bug of the {len(CATALOGUE)} in the catalogue at that time; "
        "injected-bugs.md has a run of all bugs",
    )
    yield Figure(
        "the same bugs caught by a test of one shape on two ranks, three seeds",
        "-",
        f"{share(sum(outcome.baseline for outcome in counted), len(counted))} by values, "
        f"{share(sum(outcome.baseline_all_oracles for outcome in counted), len(counted))} by all oracles",
        None,
        "the same budgets",
    )
