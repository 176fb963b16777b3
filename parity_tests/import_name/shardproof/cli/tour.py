"""The first run: built-in schemes, real text, three injected bugs, one figure, one sentence.

It runs the schemes of public functions, which can judge other code too; `--all` adds the schemes of internal parts.

Each part prints its results; the status is 0 only if every scheme is equal, the text's perplexity matches the
reference, and every injected bug is caught and identified.
"""

from __future__ import annotations

import platform
import textwrap
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from shardproof.cli import real_text, several, tour_figure
from shardproof.declare import discover
from shardproof.declare.counted import counted
from shardproof.endings.exit_status import EQUAL, MISMATCH
from shardproof.implementation.public_names import is_public
from shardproof.report import summary
from shardproof.report.out_path import check_writable, naming, write_text
from shardproof.report.sentence import Sentence, is_broken
from shardproof.report.summary import Outcome
from shardproof.verify_one_case import verify_case

READER = "vocab_parallel_logprob"  # the scheme that reads the text
READERS_TP = (1, 2, 4)


@dataclass
class Tour:
    """The results so far: the figure's lines, and everything that went wrong."""

    console: Console
    outcome: Outcome = field(default_factory=Outcome)
    caught: dict[str, bool] = field(default_factory=dict)
    verified: list[tour_figure.Line] = field(default_factory=list)
    injected: list[tour_figure.Line] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    examples: int = 0
    status: int = EQUAL

    def figure(self) -> Any:
        """All lines as a matplotlib figure, with the versions below."""
        versions = f"Python {platform.python_version()}, torch {version('torch')}, jax {version('jax')}"
        return tour_figure.figure(self.verified, self.injected, f"{counted(self.examples, 'example')}; {versions}")

    def heading(self, text: str) -> None:
        self.console.print(f"\n{text}", style="bold", highlight=False)


def run(figure_path: str, examples: int, json: str | None = None, quiet: bool = False, everything: bool = False) -> int:
    """Run the tour; returns the exit status. If `quiet`, only the closing sentence is printed."""
    check_writable(figure=figure_path, json=json)
    start, text_to_stderr = time.perf_counter(), json == "-"
    tour = judged(Console(stderr=text_to_stderr, quiet=quiet), examples, everything)
    with naming(figure_path):
        tour.figure().savefig(figure_path, dpi=130)
    tour.console.print()
    closing = _closing(tour, time.perf_counter() - start)
    is_file = not is_broken(tour.console)
    Console(stderr=text_to_stderr).print(closing, style="bold", highlight=False, soft_wrap=is_file)
    tour.console.print(f"figure: {figure_path}", highlight=False, soft_wrap=is_file)
    if json:
        fields = {"caught": tour.caught, "wrong": tour.wrong, "figure": figure_path}
        write_text(json, summary.as_json(tour.outcome, status=tour.status, **fields))
    return tour.status


def judged(console: Console, examples: int, everything: bool = False) -> Tour:
    """Run the built-in schemes, the text and the injected bugs, and print results as they come."""
    tour = Tour(console)
    _schemes(tour, examples, everything)
    _text(tour)
    _bugs(tour)
    tour.status = tour.outcome.status or (MISMATCH if tour.wrong else EQUAL)
    return tour


def _schemes(tour: Tour, examples: int, everything: bool) -> None:
    with several.workers() as started:
        built_in = discover.built_in()
        schemes = [scheme for scheme in built_in if everything or is_public(scheme.fn)]
        kind = "Every built-in scheme" if everything else "Every scheme of a public function"
        tour.heading(f"{kind} against its reference: forward, gradient, collectives, bytes")
        if len(schemes) < len(built_in):
            others = counted(len(built_in) - len(schemes), "scheme")
            tour.console.print(f"{others} of parts that are not public: shardproof tour --all", highlight=False)
        outcome = tour.outcome = several.verified(schemes, examples, started)
    tour.console.print(summary.table(outcome, tour.console.width), crop=False)
    titles = outcome.titles
    for report in outcome.reports:
        name = titles[report.scheme]
        tour.verified.append(tour_figure.line_of(name, report))
        tour.examples += report.examples
        if not report.ok:
            tour.wrong.append(f"{name} is not equal ({report.verdict})")
            tour.console.print(report, soft_wrap=not is_broken(tour.console), highlight=False)
    for name, reason in ((titles[key], reason) for key, reason in outcome.not_run.items()):
        tour.wrong.append(f"{name} was not run")
        tour.console.print(Sentence(f"not run: {name}: {reason}"), soft_wrap=True)
    for name, reason in ((titles[key], reason) for key, reason in outcome.not_judged.items()):
        tour.wrong.append(f"{name} was not judged")
        tour.console.print(Sentence(f"not judged: {reason}"), soft_wrap=True)
    for file, reason in discover.left_out().items():
        tour.console.print(Sentence(f"not run: {file}: {reason}"), soft_wrap=True)
    if not outcome.reports:
        tour.wrong.append("there was no scheme to verify")
    tour.console.print(summary.timing(outcome), highlight=False)


def _text(tour: Tour) -> None:
    tour.heading(f"Real text: {real_text.ROWS} x {real_text.LENGTH} bytes of Python's language reference")
    scheme = next((candidate for candidate in discover.built_in() if candidate.name == READER), None)
    if scheme is None:
        tour.wrong.append(f"the scheme {READER}, which reads the text, is not there")
        return
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("tp", "perplexity", "reference", "float64 ratio", "float32 ratio", "verdict"):
        grid.add_column(column, justify="left" if column == "verdict" else "right", no_wrap=True)
    for tp in READERS_TP:
        exact, single = (real_text.read_with(scheme, tp, dtype) for dtype in ("float64", "float32"))
        is_equal = exact.ok and single.report.ok
        tour.examples += 2
        tour.verified.append(tour_figure.line_of(f"real text, tp={tp}", single.report))
        ratios = [
            f"{max((tensor.ratio for tensor in r.report.tensors), default=float('nan')):.2g}" for r in (exact, single)
        ]
        grid.add_row(str(tp), exact.perplexity, exact.reference, *ratios, "equal" if is_equal else "mismatch")
        if not is_equal:
            tour.wrong.append(f"the text over tp={tp} is not equal")
            for reading in (exact, single):
                tour.console.print(reading.report, soft_wrap=not is_broken(tour.console), highlight=False)
    tour.console.print(grid)


def _bugs(tour: Tour) -> None:
    from shardproof.cli.wrong_schemes import WRONG_SCHEMES

    tour.heading(f"{len(WRONG_SCHEMES)} injected bugs")
    for bug in WRONG_SCHEMES:
        report = verify_case(bug.scheme, bug.scheme.case(dtype="float32", **bug.sizes))
        notes = [f"{label}: {note}" for label, notes_of_tensor in report.notes.items() for note in notes_of_tensor]
        is_caught = not report.ok and any(bug.expect in note for note in notes)
        tour.injected.append(tour_figure.line_of(bug.scheme.name, report))
        tour.caught[bug.mistake] = is_caught
        caught, is_file = "caught" if is_caught else "NOT CAUGHT", not is_broken(tour.console)
        tour.console.print(Sentence(f"{caught}: {bug.mistake}"), highlight=False, soft_wrap=is_file)
        shown_notes = notes if notes else [report.verdict]
        for note in shown_notes:
            tour.console.print(Sentence(textwrap.indent(note, "    ")), highlight=False, soft_wrap=is_file)
        if not is_caught:
            tour.wrong.append(f"{bug.scheme.name} was not caught as '{bug.expect}'")


def _closing(tour: Tour, seconds: float) -> str:
    if tour.wrong:
        return f"Not all is as it should be: {'; '.join(tour.wrong)}."
    schemes = len(tour.verified) - len(READERS_TP)
    all_mean = f"All {schemes} schemes mean what their references mean"
    meaning = "The one scheme means what its reference means" if schemes == 1 else all_mean
    return (
        f"{meaning}, the text reads alike on 1, 2 and 4 ranks, "
        f"and {len(tour.injected)} of {len(tour.injected)} injected bugs were caught, in {seconds:.0f} s."
    )
