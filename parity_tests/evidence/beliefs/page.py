"""docs/beliefs.md: the share of wrong beliefs that is caught, by component, and each survivor with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parity_tests.evidence.beliefs.belief import BELIEFS, Belief
from parity_tests.evidence.beliefs.judge import LIMIT_S
from parity_tests.evidence.injected_bugs.runner import FARTHEST
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants.tiers import of_bug
from parity_tests.evidence.page import bullets, by_component, joined, markdown_table, share, written_by

PROMISED_DRAWN, PROMISED_TESTS = 0.85, 0.97
COLUMNS = ("component", "beliefs", "drawn cases", "with the fast tests", "caught by nothing", "more to run")
HEAD = """# Wrong beliefs

A mutant changes an operator; a person has a wrong idea. These are {count} ideas that a good engineer may have of our
own components. Each is wrong under a condition: that a gradient has the strides of its parameter, that a peer is a
global rank, that every rank counts as many tokens. None of them swaps an operator. `parity_tests/evidence/beliefs/`
has them as diffs.

A belief is judged by `shardproof verify` with default settings: by up to {farthest} schemes of its component that run
its line, the nearest first, then by as many of the other components. No further scheme is begun after {limit:.0f}
seconds. A belief that these miss is judged by the fast tests of the component that run the line. Outcomes of earlier
runs are kept.

{written_by}

{closing}

{table}
"""


@dataclass(frozen=True)
class Verdict:
    """The scheme that catches a belief with its oracle, or else the fast test."""

    belief: Belief
    drawn: str | None
    oracle: str | None
    test: str | None
    is_tried: bool  # on drawn cases
    is_all: bool  # also on the schemes of other components
    is_open: bool  # drawn cases or tests are still to be run

    @property
    def survives(self) -> bool:
        return not (self.is_open or self.drawn or self.test)


def verdicts(journal: Journal, beliefs: Sequence[Belief] = BELIEFS) -> list[Verdict]:
    """The journal's verdict on each belief that is not equivalent."""
    return [_verdict(belief, journal.of(of_bug(belief).key)) for belief in beliefs if not belief.equivalent]


def _verdict(belief: Belief, record: dict[str, Any]) -> Verdict:
    is_tried = "drawn" in record
    is_open = not is_tried or not (record["drawn"] or "tests" in record)
    return Verdict(
        belief,
        record.get("drawn"),
        record.get("oracle"),
        record.get("tests"),
        is_tried,
        record.get("is_all", False),
        is_open,
    )


def closing(all_verdicts: Sequence[Verdict]) -> list[str]:
    """The figures in sentences, for beliefs that drawn cases were tried on."""
    tried = [each for each in all_verdicts if each.is_tried]
    drawn = sum(bool(each.drawn) for each in tried)
    lines = [
        f"{share(drawn, len(tried))} are caught by drawn cases; the promise is {PROMISED_DRAWN:.0%}.",
        f"{_with_tests(tried)} are caught by drawn cases or fast tests; the promise is {PROMISED_TESTS:.0%}.",
    ]
    own_alone = sum(not (each.drawn or each.is_all) for each in tried)
    if own_alone:
        lines += [f"{own_alone} of the missed ones were tried on the schemes of their own component alone."]
    untried, untested = len(all_verdicts) - len(tried), sum(each.is_open for each in tried)
    if untried or untested:
        lines += [f"Not run yet: drawn cases on {untried}, fast tests on {untested} of those missed."]
    return lines


def is_promised(all_verdicts: Sequence[Verdict]) -> bool:
    """Whether all beliefs are judged, and as many caught as promised."""
    total = len(all_verdicts)
    drawn, survivors = sum(bool(each.drawn) for each in all_verdicts), sum(each.survives for each in all_verdicts)
    return (
        not any(each.is_open for each in all_verdicts)
        and drawn >= PROMISED_DRAWN * total
        and total - survivors >= PROMISED_TESTS * total
    )


def table(all_verdicts: Sequence[Verdict]) -> str:
    """A line for each component and one for all."""
    groups = [*by_component(all_verdicts, lambda each: each.belief.component), ("all", all_verdicts)]
    return markdown_table(COLUMNS, [_row(name, group) for name, group in groups])


def _row(name: str, group: Sequence[Verdict]) -> tuple[str, ...]:
    tried = [each for each in group if each.is_tried]
    drawn = sum(bool(each.drawn) for each in tried)
    counts = sum(each.survives for each in tried), sum(each.is_open for each in group)
    return name, str(len(group)), share(drawn, len(tried)), _with_tests(tried), *map(str, counts)


def _with_tests(tried: Sequence[Verdict]) -> str:
    """The share that drawn cases or tests catch; `at least` while tests are still to be run."""
    caught = share(sum(bool(each.drawn or each.test) for each in tried), len(tried))
    return f"at least {caught}" if any(each.is_open for each in tried) else caught


def text(all_verdicts: Sequence[Verdict]) -> str:
    """The page."""
    head = HEAD.format(
        count=len(all_verdicts), farthest=FARTHEST, limit=LIMIT_S, written_by=written_by("make beliefs"),
        closing=bullets(closing(all_verdicts)),
        table=table(all_verdicts),
    )  # fmt: skip
    survivors = [each for each in all_verdicts if each.survives]
    untested = [each for each in all_verdicts if each.is_tried and each.is_open]
    tested = [each for each in all_verdicts if each.test and not each.drawn]
    equivalent = [belief for belief in BELIEFS if belief.equivalent]
    return joined(
        head,
        _section("Caught by nothing", [f"{_line(each)}. {_reason(each)}." for each in survivors]),
        _section(
            "Caught by the tests alone", [f"{_line(each)}; by `{each.test}`. {_reason(each)}." for each in tested]
        ),
        _section("Missed by drawn cases, tests not run yet", [f"{_line(each)}. {_reason(each)}." for each in untested]),
        _section("Equivalent", [f"`{each.at}`: {each.name}; {each.equivalent}." for each in equivalent]),
    )


def _section(title: str, lines: Sequence[str]) -> str:
    return f"## {title}\n\n{bullets(lines)}" if lines else ""


def _line(verdict: Verdict) -> str:
    return f"`{verdict.belief.at}`: {verdict.belief.name}; it shows for {verdict.belief.condition}"


def _reason(verdict: Verdict) -> str:
    reason = verdict.belief.survives or "not read yet"
    return reason[0].upper() + reason[1:]
