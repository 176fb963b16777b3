"""`python -m parity_tests.evidence.injected_bugs.first_notes`: the share of true first notes in a sample of bugs.

A first note is the headline of a report. Each bug has a kind of mistake, and each kind of note fits some kinds. A note
is false if it does not fit, such as a rounding for a missing sum, or an offset for a wrong scale. A note that only
states an observation (`no pattern`, `not finite`) claims nothing and is counted apart. Three figures: the true notes
from one failing case, the true notes after the experiments of `verify`, and the failing cases that were called
undecided, which would hide the bug.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated

import numpy as np
import typer

from parity_tests.evidence.injected_bugs.headlines import Headlines, of_bug
from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug, patched_text
from shardproof.experiments.edited_inputs import REFERENCE_WITH
from shardproof.experiments.edited_lines import OR_CALLED
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.experiments.first_overflow import FIRST_MADE_BY
from shardproof.experiments.wrong_backwards import NO_DERIVATIVE
from shardproof.explain.arithmetic import ADDED_BEFORE
from shardproof.explain.note import READ_TOO_EARLY

# The kinds that an edit of the reference's inputs fits: another order, or another number.
ORDERS = {"order", "sequence", "border", "group", "schedule"}
NUMBERS = {"reduction", "group", "scale", "statistic", "tied"}
# The kinds that an unread input fits: if every rank takes the first rank's part, nobody reads the other parts.
UNREAD = {"scale", "statistic", "border", "sequence", "group", "tied", "call"}

# Words of a note, and the kinds that such a note fits.
MEANS = (
    ("is not differentiable", {"reduction", "group", "scale", "tied"}),
    ("no mask, or a wrong one", {"border", "reduction"}),
    ("right once the assignment", {"reduction", "border", "order", "tied"}),
    ("right once", {"reduction", "group", "scale", "statistic", "tied", "schedule"}),
    ("of the function does not depend on", UNREAD),
    ("no output of the function depends on", UNREAD),
    ("rounded to ", {"precision"}),
    ("within what", {"precision"}),
    ("error of rounding", {"precision"}),
    ("right without the other call", {"call", "buffer"}),
    ("the order of the other call", {"call"}),
    ("the order of memory", {"call"}),
    ("terms reach other ranks", {"order", "group", "schedule"}),
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
    "a small error",
    "not finite",
    "finite where",
    "no gradient",
    "forward equal",
    "as it was before",
    "the reference's",
    "right with normal values",
)
LINE_NOTE = "forward equal, gradient not: "  # a collective or a place that lacks a sum, or has one too many
LINE_KINDS = {"reduction", "group", "scale", "tied", "buffer", "schedule"}
WAIT_KINDS = {"buffer", "schedule"}  # a collective that is not waited for
NUMBER_EDIT = r" (times|plus|minus|with the opposite sign)\b"  # in a note on an edit of the reference's inputs
NAMED_LINE = re.compile(r"[\w.]+\.py:\d+")
UNDECIDED = "which is right only where"  # in a note that could not be compared with a passing case
ANYWHERE = (
    "its own shard",
    "their own shards",
    "wrong only",
    "right only",
    "is zero",
    "hold different copies",
)  # notes on a place, which fit any kind but precision
TRUE, FALSE, NOTHING = "true", "false", "claims nothing"


def truth(kind: str, note: str, lines: Collection[str] = ()) -> str:
    """Whether a note fits a bug of this kind. A note on a place fits every kind but precision.

    `lines` are the lines of the injected text, as `file:number`. If a note names lines to edit, or the line that adds
    an input on each rank, the first one must be among them. A note on a line or the code that it calls claims nothing,
    and so does a note on the first NaN if it names another line.
    A backward that is no derivative must stand in their file.
    """
    if OR_CALLED in note:
        return NOTHING
    named = NAMED_LINE.findall(note) if note.startswith(RIGHT_ONCE) or ADDED_BEFORE in note else []
    if lines and named:
        return TRUE if named[0] in lines else FALSE
    if NO_DERIVATIVE in note:
        files = {line.partition(":")[0] for line in lines}
        return TRUE if any(place.partition(":")[0] in files for place in NAMED_LINE.findall(note)) else FALSE
    if FIRST_MADE_BY in note:
        return TRUE if set(lines).intersection(NAMED_LINE.findall(note)) else NOTHING
    if note.startswith(LINE_NOTE):
        return TRUE if kind in LINE_KINDS else FALSE
    if READ_TOO_EARLY in note:
        return TRUE if kind in WAIT_KINDS else FALSE
    if note.startswith(STATES) or UNDECIDED in note:
        return NOTHING
    if REFERENCE_WITH in note:
        return TRUE if kind in (NUMBERS if re.search(NUMBER_EDIT, note) else ORDERS) else FALSE
    if any(words in note for words in ANYWHERE):
        return FALSE if kind == "precision" else TRUE
    return next((TRUE if kind in kinds else FALSE for words, kinds in MEANS if words in note), NOTHING)


def truth_for(bug: InjectedBug, note: str) -> str:
    """Whether a note is true of a bug."""
    return truth(bug.kind, note, lines_of(bug))


def lines_of(bug: InjectedBug) -> list[str]:
    """The lines of the injected text, as notes write them.

    If the bug only removes text, the lines of the statement around it, or the line where it stood.
    """
    patch = patched_text(bug)
    count = max(1, len(bug.new.rstrip("\n").splitlines()))
    lines = range(patch.first_line, patch.first_line + count)
    if not bug.new.strip():
        statements = (node for node in ast.walk(ast.parse(patch.text)) if isinstance(node, ast.stmt))
        spans = (range(n.lineno, (n.end_lineno or n.lineno) + 1) for n in statements if not hasattr(n, "body"))
        lines = next((span for span in spans if patch.first_line in span), lines)
    file = patch.file.rpartition("/")[2]
    return [f"{file}:{number}" for number in lines]


def sample(bugs: Sequence[InjectedBug], count: int, seed: int = 0) -> list[InjectedBug]:
    """A seeded sample of the bugs that values or gradients show, from each component in turn."""
    by_component: dict[str, list[InjectedBug]] = defaultdict(list)
    for bug in bugs:
        if not bug.equivalent and not bug.survives and bug.expect.startswith(("value", "gradient")):
            by_component[bug.component].append(bug)
    rng = np.random.Generator(np.random.Philox(key=[0, seed]))
    shuffled = [[group[i] for i in rng.permutation(len(group))] for group in by_component.values()]
    turns = [group[turn] for turn in range(max(map(len, shuffled))) for group in shuffled if turn < len(group)]
    return turns[:count]


def measured(bugs: Iterable[InjectedBug]) -> Iterator[tuple[InjectedBug, Headlines | None]]:
    """Each bug with its headlines, all from one process; if a bug ends the process, another one takes over."""
    context = get_context("spawn")  # JAX does not start in a forked process
    pool = ProcessPoolExecutor(1, context)
    try:
        for bug in bugs:
            try:
                headlines = pool.submit(of_bug, bug).result()
            except BrokenProcessPool:
                print(f"{bug.component}: {bug.name} ends the process", flush=True)
                pool = ProcessPoolExecutor(1, context)
                continue
            yield bug, headlines
    finally:
        pool.shutdown()


def main(
    pattern: Annotated[str, typer.Argument(help="Only bugs whose name, kind or symbol contains this.")] = "",
    count: Annotated[int, typer.Option("--sample", min=1, help="How many bugs.")] = 60,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed draws other bugs.")] = 0,
    every: Annotated[bool, typer.Option("--every", help="Print each bug's notes.")] = False,
    words: Annotated[bool, typer.Option("--words", help="Only bugs that expect words of a note.")] = False,
) -> None:
    """Inject a sample of the catalogue and print how many first notes are true of the injected bug."""
    from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE

    chosen = [bug for bug in CATALOGUE if any(pattern in text for text in (bug.name, bug.kind, bug.at))]
    if words:
        chosen = [bug for bug in chosen if bug.expect.partition(":")[2].strip()]
    results: list[tuple[InjectedBug, Headlines]] = []
    for bug, headlines in measured(sample(chosen, count, seed)):
        if headlines is None:
            continue
        results.append((bug, headlines))
        if every:
            print(f"{bug.component}: {bug.name} ({bug.kind})\n  {truth_for(bug, headlines.alone)}: {headlines.alone}")
            ending = "  UNDECIDED" if headlines.is_undecided else ""
            print(f"  {truth_for(bug, headlines.tested)}: {headlines.tested}{ending}", end=" ")
            print(f"({headlines.seconds:.1f} s of experiments)", flush=True)
    for name, notes in (
        ("one case alone", [(bug, headlines.alone) for bug, headlines in results]),
        ("after experiments", [(bug, headlines.tested) for bug, headlines in results]),
    ):
        counted = Counter(truth_for(bug, note) for bug, note in notes)
        claims, share = counted[TRUE] + counted[FALSE], counted[TRUE] / max(len(notes), 1)
        print(f"{name}: {counted[TRUE]} of {claims} first notes are true, {counted[NOTHING]} claim nothing", end="; ")
        print(f"{share:.0%} of {len(notes)} name a cause")
    undecided = sum(headlines.is_undecided for _, headlines in results)
    print(f"{undecided} of {len(results)} failing cases are called undecided")


if __name__ == "__main__":
    typer.run(main)
