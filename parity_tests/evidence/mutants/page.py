"""docs/mutants.md: the share of a sample that is caught, by component, and each survivor."""

from __future__ import annotations

from collections.abc import Sequence

from parity_tests.evidence.injected_bugs.runner import FARTHEST
from parity_tests.evidence.mutants.by_tests import CAP_S
from parity_tests.evidence.mutants.operators import KINDS
from parity_tests.evidence.mutants.outcomes import Outcome
from parity_tests.evidence.mutants.places import RULES
from parity_tests.evidence.page import bullets, by_component, joined, markdown_table, sections, share, written_by

PROMISED_DRAWN, PROMISED_TESTS, PROMISED_COUNT = 0.85, 0.97, 1000
TESTED_AT_ONCE = "Read as equivalent, tested at once"
COLUMNS = ("component", "mutants", "drawn cases", "with the tests", "survive", "equivalent")
HEAD = """# Mutants

A mutant is one place of our own components with another text, made by a rule: {kinds}.
The [catalogue of injected bugs](injected-bugs.md) is written by hand; this is a sample of all that rules make, drawn
by a seed, each component in proportion.

Each mutant is judged by the drawn cases that run its line, of {examples} of each scheme and of the {farthest} nearest
schemes that have any, with the budgets and oracles of `shardproof verify`. Every scheme computes tensors, and its
reference reads its inputs; so drawn cases run code that has mathematics. Their share is of the mutants whose line a
drawn case runs. Of the others, as in names, messages, files and pictures, no such share is promised: tests judge them.

What they do not catch is judged by the tests that run its line, the fastest first, of its component and then of the
others. A test that starts processes, in which no lines are recorded, counts as running what the tests of its file run,
and all of the functions that the file imports. The tests of a mutant have {cap:.0f} s: what none of them has caught by
then survives. A mutant whose cases or tests fail without it is not caught by them.

Not made are mutants of

{rules}

A survivor that was looked at and that no test on a CPU can see is equivalent and not counted: its values are the same,
or it changes cost alone, or CUDA or another version of torch alone runs it. `parity_tests/evidence/mutants/judged.toml`
says why, line by line.

{written_by}
{count} mutants of {candidates}.

{closing}

{table}
"""


def counted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that are not equivalent."""
    return [outcome for outcome in outcomes if not outcome.equivalent]


def reached(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The counted outcomes of mutants whose line a drawn case runs."""
    return [outcome for outcome in counted(outcomes) if outcome.schemes]


def closing(outcomes: Sequence[Outcome]) -> list[str]:
    """The figures, in sentences."""
    real = counted(outcomes)
    caught_by_cases = sum(outcome.drawn is not None for outcome in real)
    caught = sum(bool(outcome.drawn or outcome.tests) for outcome in real)
    of_cases, other = len(reached(outcomes)), len(real) - len(reached(outcomes))
    few = f"; the promise is made of {PROMISED_COUNT}" if len(real) < PROMISED_COUNT else ""
    capped = sum(outcome.capped and not outcome.tests for outcome in real)
    untested = [outcome for outcome in real if not outcome.is_tested]
    return [
        f"{share(caught_by_cases, of_cases)} of those that a drawn case runs are caught by drawn cases alone; "
        f"promised are {PROMISED_DRAWN:.0%}{few}. No drawn case runs {other} others.",
        f"{share(caught, len(real))} are caught by drawn cases or tests; promised are {PROMISED_TESTS:.0%}{few}.",
        f"{len(outcomes) - len(real)} more are read as equivalent.",
        f"{len(untested)} of the survivors have tests that were not run yet.",
        f"{capped} of the survivors had their time before all tests were run.",
    ]


def is_promised(outcomes: Sequence[Outcome]) -> bool:
    """Whether the shares are those that are promised."""
    real = counted(outcomes)
    caught_by_cases = sum(outcome.drawn is not None for outcome in real)
    caught = sum(bool(outcome.drawn or outcome.tests) for outcome in real)
    return caught_by_cases >= PROMISED_DRAWN * len(reached(outcomes)) and caught >= PROMISED_TESTS * len(real)


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each component and one for all."""
    groups = [*by_component(outcomes, lambda each: each.mutant.component), ("all", outcomes)]
    return markdown_table(COLUMNS, [_row(name, group) for name, group in groups])


def survivors(outcomes: Sequence[Outcome]) -> str:
    """A line for each mutant that nothing catches, the equivalent ones last, each with the reason."""
    lines = []
    for outcome in sorted(outcomes, key=lambda each: each.equivalent is not None):
        if not outcome.drawn and not outcome.tests:
            mutant = outcome.mutant
            reason = f" Equivalent: {outcome.equivalent}" if outcome.equivalent else ""
            reason = reason or ("" if outcome.is_tested and not outcome.capped else " Not all of its tests have run.")
            lines.append(
                f"- `{mutant.file}:{mutant.first_line}`, `{mutant.symbol}`, {mutant.kind}: `{mutant.change}`.{reason}"
            )
    return "\n".join(lines)


def text(outcomes: Sequence[Outcome], seed: int, examples: int, candidates: int, before: str = "") -> str:
    """The page, with the section on equivalents that it had before."""
    head = HEAD.format(
        kinds=", ".join(KINDS),
        rules=";\n".join(f"- {rule}" for rule in RULES) + ".",
        examples=examples,
        farthest=FARTHEST,
        cap=CAP_S,
        written_by=written_by("make mutants", seed=seed),
        count=len(outcomes),
        candidates=candidates,
        closing=bullets(closing(outcomes)),
        table=table(outcomes),
    )
    listed = survivors(outcomes)
    return joined(head, f"## Survivors\n\n{listed}" if listed else "", sections(before).get(TESTED_AT_ONCE, ""))


def of_equivalents(count: int, seen: int) -> str:
    """How many of the mutants that are read as equivalent all tests see, and when they were run."""
    return (
        f"Of {count} mutants that are read as equivalent, {seen} are seen by a test: all are made at once, and all "
        f"tests are run.\n\n{written_by('python -m parity_tests.evidence.mutants.equivalents')}"
    )


def _row(name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    real = counted(outcomes)
    caught_by_cases = sum(outcome.drawn is not None for outcome in real)
    caught = sum(bool(outcome.drawn or outcome.tests) for outcome in real)
    shares = (share(caught_by_cases, len(reached(outcomes))), share(caught, len(real)))
    return name, str(len(real)), *shares, str(len(real) - caught), str(len(outcomes) - len(real))
