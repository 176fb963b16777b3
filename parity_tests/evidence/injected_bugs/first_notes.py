"""`python -m parity_tests.evidence.injected_bugs.first_notes`: the share of true first notes, of a sample.

A first note is the headline of a report. Each bug knows its kind of mistake, and each kind of note means some kinds of
mistake, so that a note is false where the two do not go together: a rounding where a sum was left out, an offset where
a scale was wrong. A note that only states an observation (`no pattern`, `not finite`) claims nothing and is counted
apart. Three figures: true notes as one failing case suggests them, true notes after the experiments of `verify`, and
how many failing cases were called undecided, which would hide the bug in that case.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, NamedTuple

import numpy as np
import typer

from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug, patched_text
from parity_tests.evidence.injected_bugs.runner import NOT_TRIED, patched_schemes
from parity_tests.evidence.injected_bugs.trials import SchemeTrials
from shardproof.declare.declared import Declared
from shardproof.experiments.notes import check_notes
from shardproof.experiments.smallest import shrink
from shardproof.experiments.undecided import mark_undecided
from shardproof.report.report import Report

# How a sentence begins or a part of it, and the kinds of mistakes that it can truly mean.
MEANS = (
    ("is not differentiable", {"reduction", "group", "scale", "tied"}),
    ("right once the assignment", {"reduction", "border", "order", "tied"}),
    ("right once", {"reduction", "group", "scale", "statistic", "tied", "schedule"}),
    ("within what", {"precision"}),
    ("error of rounding", {"precision"}),
    ("that of the other call", {"call"}),
    ("in another order", {"order", "sequence", "border", "group", "schedule"}),
    (" off along ", {"border", "order", "sequence"}),
    ("added constant", {"statistic", "reduction", "scale", "group", "tied", "border"}),
    ("constant factor", {"reduction", "group", "scale", "statistic", "tied", "buffer", "schedule"}),
    ("opposite sign", {"scale", "statistic"}),
    ("sum", {"reduction", "group", "scale", "statistic", "tied", "buffer", "schedule"}),
    ("term", {"reduction", "group", "scale", "tied", "buffer", "border", "schedule"}),
    ("is counted", {"reduction", "scale", "tied"}),
    ("is added once", {"reduction", "scale", "tied", "statistic"}),
    ("is left out", {"reduction", "scale", "tied", "statistic", "border"}),
)
STATES = (
    "no pattern",
    "not finite",
    "finite where",
    "no gradient",
    "forward equal",
    "as it was before",
    "the reference's",
)
OF_A_LINE = "forward equal, gradient not: "  # a collective or a place that lacks a sum, or has one too many
KINDS_OF_A_LINE = {"reduction", "group", "scale", "tied", "buffer", "schedule"}
UNDECIDED = "which is right only where"  # of a fact that no passing case could be compared with
ANYWHERE = (
    "its own shard",
    "their own shards",
    "wrong only",
    "right only",
    "is zero",
    "hold different copies",
)  # of a place: true of any kind but one
TRUE, FALSE, NOTHING = "true", "false", "claims nothing"
SCHEMES, EXAMPLES = 3, 12  # of a bug: the nearest schemes and drawn cases of each that are tried


class Headlines(NamedTuple):
    """The first notes of one bug's smallest failing case: of that case alone, and after the experiments."""

    bug: InjectedBug
    alone: str
    tested: str
    is_undecided: bool


def truth(kind: str, note: str) -> str:
    """Whether a note may be true of a bug of this kind; a place says nothing of the mistake, but of no rounding."""
    if note.startswith(OF_A_LINE):
        return TRUE if kind in KINDS_OF_A_LINE else FALSE
    if note.startswith(STATES) or UNDECIDED in note:
        return NOTHING
    if any(words in note for words in ANYWHERE):
        return FALSE if kind == "precision" else TRUE
    return next((TRUE if kind in kinds else FALSE for words, kinds in MEANS if words in note), NOTHING)


def sample(bugs: Sequence[InjectedBug], count: int) -> list[InjectedBug]:
    """So many bugs that values could explain, the components in turn, drawn from a fixed seed."""
    by_component: dict[str, list[InjectedBug]] = defaultdict(list)
    for bug in bugs:
        if not bug.equivalent and not bug.survives and bug.expect.startswith(("value", "gradient")):
            by_component[bug.component].append(bug)
    rng = np.random.Generator(np.random.Philox(key=[0, 0]))
    shuffled = [[of_one[i] for i in rng.permutation(len(of_one))] for of_one in by_component.values()]
    turns = [of_one[turn] for turn in range(max(map(len, shuffled))) for of_one in shuffled if turn < len(of_one)]
    return turns[:count]


def headlines(bug: InjectedBug, component_trials: Iterable[SchemeTrials]) -> Headlines | None:
    """The notes on the first failing case that has any, after it is shrunk; None if no case has notes."""
    patch = patched_text(bug)
    running = (trials for trials in component_trials if trials.runs(patch.file, patch.replaced_lines))
    affected = list(islice(running, SCHEMES))
    modules, patched = patched_schemes(bug, [each.scheme for each in affected])
    with modules:
        for each in affected:
            scheme = patched[each.scheme.key]
            for trial in each.drawn:
                report = trial.on(scheme)
                if report.notes:
                    return _headlines(bug, scheme, shrink(scheme, report, {}))
    return None


def _headlines(bug: InjectedBug, scheme: Declared, report: Report) -> Headlines:
    after = check_notes(scheme, report)
    first = next(iter(report.notes))
    return Headlines(bug, report.notes[first][0], after.notes[first][0], mark_undecided(scheme, report).is_undecided)


def main(
    count: Annotated[int, typer.Option("--sample", min=1, help="How many bugs.")] = 60,
    every: Annotated[bool, typer.Option("--every", help="Print each bug's notes.")] = False,
) -> None:
    """Inject a sample of the catalogue and print how many first notes are true of the injected bug."""
    from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
    from parity_tests.evidence.injected_bugs.report import without_schedule_warnings
    from shardproof.declare import discover
    from shardproof.engines.speed_advice import without_advice

    built_in = [scheme for scheme in discover.built_in() if scheme.name not in NOT_TRIED]
    trials = [SchemeTrials(scheme, EXAMPLES) for scheme in built_in if "lockstep" in scheme.engines]
    results: list[Headlines] = []
    with without_advice(), without_schedule_warnings():
        for bug in sample(CATALOGUE, count):
            component_trials = [each for each in trials if f".{bug.component}." in each.scheme.key]
            headline = headlines(bug, component_trials)
            results += [headline] if headline else []
            if every and headline:
                verdicts = truth(bug.kind, headline.alone), truth(bug.kind, headline.tested)
                print(f"{bug.component}: {bug.name} ({bug.kind})\n  {verdicts[0]}: {headline.alone}", flush=True)
                print(f"  {verdicts[1]}: {headline.tested}{'  UNDECIDED' if headline.is_undecided else ''}", flush=True)
    for name, notes in (
        ("one case alone", [s.alone for s in results]),
        ("after experiments", [s.tested for s in results]),
    ):
        counted = Counter(truth(headline.bug.kind, note) for headline, note in zip(results, notes, strict=True))
        claims, share = counted[TRUE] + counted[FALSE], counted[TRUE] / max(len(notes), 1)
        print(f"{name}: {counted[TRUE]} of {claims} first notes are true, {counted[NOTHING]} claim nothing", end="; ")
        print(f"{share:.0%} of {len(notes)} name a cause")
    print(f"{sum(headline.is_undecided for headline in results)} of {len(results)} failing cases are called undecided")


if __name__ == "__main__":
    typer.run(main)
