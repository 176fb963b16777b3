"""The end of a run of many schemes: every outcome in one table, JSON and JUnit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from json import dumps  # a file of schemes may replace the module's own
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardproof.declare.counted import counted
from shardproof.endings.exit_status import BY_SIGNAL, EQUAL, MISMATCH, NOTHING, RANK_FAILED, USAGE, worst
from shardproof.judge.compare import TensorComparison
from shardproof.report.report import Report
from shardproof.report.sentence import Sentence, is_broken


@dataclass(frozen=True)
class VerifyOptions:
    """Arguments of the command line."""

    engine: str = "lockstep"
    examples: int | None = None
    profile: str = "dev"
    seed: int = 0
    fixed: Mapping[str, Any] = field(default_factory=dict)  # mesh axes, dims and options with a given value
    mesh_names: tuple[str, ...] = ()  # the names given by --mesh
    dim_names: tuple[str, ...] = ()  # and by --dim
    dtype: str | None = None
    inside_subgroup: bool | None = None
    timeout: float | None = None  # seconds without a collective
    limit: float | None = None  # seconds after which no further case of a scheme is drawn
    fail_fast: bool = False
    jax_cache: str | None = None
    replay_dir: str | None = None
    html: str | None = None
    json: str | None = None
    junit: str | None = None
    quiet: bool = False
    verbose: bool = False
    traceback: bool = False
    implementation: str | None = None  # name or file of the module whose functions are judged
    expected_failures: str | None = None
    types: bool = False  # whether spmd-types is asked of every scheme, and not only of a failing one

    @property
    def files(self) -> dict[str, str | None]:
        """Files for the outcome, by option; `-` is standard output."""
        return {"html": self.html, "json": self.json, "junit": self.junit}


@dataclass(frozen=True)
class Expected:
    """The verdict of an expected failure, and its reason."""

    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class Place:
    """A scheme's name, and the file and line that declare it."""

    name: str
    file: str
    line: int

    @property
    def path(self) -> Path:
        """The file, relative to here if it lies below."""
        path = Path(self.file)
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@dataclass
class Outcome:
    """The reports of verified schemes, and for each other scheme the reason why it has no report.

    The keys are the schemes' keys, which name a file: two files may declare schemes of the same name.
    """

    reports: list[Report] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # measured in the process that verified the scheme
    processes: int = 1  # number of processes that verified schemes side by side
    places: dict[str, Place] = field(default_factory=dict)
    not_offered: dict[str, str] = field(default_factory=dict)  # schemes that another implementation does not offer
    expected: dict[str, Expected] = field(default_factory=dict)
    not_judged: dict[str, str] = field(
        default_factory=dict
    )  # schemes that cannot be judged as declared, with a sentence for each
    statuses: dict[str, int] = field(default_factory=dict)  # where the status is not 2
    ended_by: int | None = None  # the signal that has ended the command before its end

    def add(self, other: Outcome) -> None:
        """Add the outcomes of other schemes."""
        self.reports += other.reports
        self.not_run.update(other.not_run)
        self.seconds.update(other.seconds)
        self.places.update(other.places)
        self.not_offered.update(other.not_offered)
        for name, sentence in other.not_judged.items():
            self.reject(name, sentence, other.statuses.get(name, USAGE))

    def reject(self, key: str, sentence: str, status: int = USAGE) -> None:
        """Record a scheme that has no verdict, and the reason."""
        self.not_judged[key] = sentence
        if status != USAGE:
            self.statuses[key] = status

    @property
    def keys(self) -> set[str]:
        """The schemes that have a report, or a reason why not."""
        return {*(report.scheme for report in self.reports), *self.not_run, *self.not_offered, *self.not_judged}

    @property
    def titles(self) -> dict[str, str]:
        """Each scheme's name, or `file.py::name`, a target of `verify`, if another file has a scheme of that name."""
        keys = [*self.places, *(report.scheme for report in self.reports)]
        keys += [*self.not_run, *self.not_offered, *self.not_judged]
        names = {key: self.places[key].name if key in self.places else key.rpartition(":")[2] for key in keys}
        count = Counter(names.values())
        in_files = {key: f"{place.path}::{place.name}" for key, place in self.places.items() if count[place.name] > 1}
        return names | in_files

    @property
    def status(self) -> int:
        if self.ended_by is not None:
            return BY_SIGNAL + self.ended_by
        unexpected = [report for report in self.reports if not self.is_expected(report)]
        statuses = [self.statuses.get(key, USAGE) for key in self.not_judged]
        statuses += [MISMATCH if report.failure is None else RANK_FAILED for report in unexpected if not report.ok]
        statuses += [MISMATCH] * len(self.unexpected_passes)
        return worst(statuses) or (EQUAL if self.reports else NOTHING)

    @property
    def failed(self) -> list[str]:
        """Keys of schemes that do not pass, and are not expected to fail."""
        reports = [report.scheme for report in self.reports if not report.ok and not self.is_expected(report)]
        return [*reports, *self.not_judged]

    @property
    def is_one_unusable_scheme(self) -> bool:
        """Whether the only scheme is unusable: its one sentence is all there is to print."""
        return len(self.not_judged) == 1 and not (self.reports or self.not_run or self.not_offered)

    def is_expected(self, report: Report) -> bool:
        """Whether the report is the failure that its scheme is expected to have."""
        expected = self.expected.get(report.scheme)
        return not report.ok and expected is not None and expected.verdict == report.verdict

    @property
    def unexpected_passes(self) -> list[str]:
        """Keys of schemes that pass and were expected to fail."""
        return [report.scheme for report in self.reports if report.ok and report.scheme in self.expected]


SLOWEST = 5
MAX_REASONS = 5
ENDED_BEFORE = "the command ended before its turn"


def show(console: Console, outcome: Outcome, options: VerifyOptions) -> None:
    """Print reports and closing lines: full reports for a single scheme and for failures, else the table."""
    single = len(outcome.reports) == 1
    if len(outcome.reports) > 1 and not options.quiet:
        console.print(table(outcome, console.width), crop=False)
    one_line = not is_broken(console)
    titles, left_out = outcome.titles, dict[str, list[str]]()
    for report in outcome.reports:
        title = titles[report.scheme]
        is_shown = not report.ok and not outcome.is_expected(report)
        if is_shown or options.verbose or (single and not options.quiet):
            if "::" in title:  # the report itself has the name only
                console.print(Sentence(f"{title}:"), soft_wrap=one_line)
            console.print(report, highlight=False, soft_wrap=one_line)
            if options.traceback and report.failure is not None and report.failure.traceback:
                console.print(report.failure.traceback, markup=False, highlight=False, soft_wrap=one_line)
        if options.verbose:
            console.print(report.ledger_text(), markup=False, highlight=False, soft_wrap=one_line)
        elif report.ok and not single and not options.quiet:
            for omission in report.omissions():
                left_out.setdefault(omission, []).append(title)
    for omission, schemes in left_out.items():
        line = f"left out: {', '.join(schemes)}: {omission}"
        console.print(line, markup=False, highlight=False, soft_wrap=one_line)
    for line in [*_expectations(outcome), *without_report(outcome)]:
        console.print(Sentence(line), soft_wrap=one_line)
    if not options.quiet:
        for line in _not_offered({titles[key]: reason for key, reason in outcome.not_offered.items()}):
            console.print(Sentence(line), soft_wrap=one_line)
    if not single and not options.quiet and outcome.seconds:
        console.print(Sentence(timing(outcome)), soft_wrap=one_line)
    console.print(Sentence(closing(outcome)), soft_wrap=one_line)


def without_report(outcome: Outcome) -> list[str]:
    """One sentence for each scheme that was not run or not judged."""
    titles, rest = outcome.titles, [key for key, reason in outcome.not_run.items() if reason == ENDED_BEFORE]
    listed = {key: reason for key, reason in outcome.not_run.items() if key not in rest or len(rest) <= MAX_REASONS}
    not_run = [f"not run: {titles[key]}: {reason}" for key, reason in listed.items()]
    if len(rest) > MAX_REASONS:
        not_run.append(f"not run: {len(rest)} schemes, from {titles[rest[0]]} on: {ENDED_BEFORE}")
    return not_run + [f"not judged: {reason}" for reason in outcome.not_judged.values()]


def _not_offered(reasons: Mapping[str, str]) -> list[str]:
    """Lines on schemes that were not offered: each with its reason, or for many schemes the names and one reason."""
    if len(reasons) > MAX_REASONS:
        first = f"{reasons[next(iter(reasons))]}; 'shardproof list' names what each scheme verifies"
        return [f"not offered: {', '.join(reasons)}", f"  the first: {first}"]
    return [f"not offered: {name}: {reason}" for name, reason in reasons.items()]


def _expectations(outcome: Outcome) -> list[str]:
    """One line for each expected failure, and for each expectation that did not come true."""
    lines, titles = [], outcome.titles
    for report in outcome.reports:
        expected, title = outcome.expected.get(report.scheme), titles[report.scheme]
        if expected is None:
            continue
        reason = f" ({expected.reason})" if expected.reason else ""
        if outcome.is_expected(report):
            lines.append(f"expected: {title}: {report.verdict}{reason}")
        else:
            what = "passes" if report.ok else report.verdict
            lines.append(f"unexpected: {title}: {what}, where {expected.verdict} is expected{reason}")
    return lines


# Columns dropped for lack of room, in this order; before that, meshes are abbreviated.
OPTIONAL_COLUMNS = ("mesh", "gradient error", "forward error", "bytes/rank", "examples", "error/budget")
TEXTS = ("verdict", "scheme", "mesh")
LEAST_MESH = 12  # columns for a shortened mesh
GAP = 2  # between columns


def table(outcome: Outcome, width: int) -> Table:
    """One line per scheme, verdict first: error over budget, examples, bytes, errors and mesh.

    It has the columns that fit into `width`: a terminal's own width; for a file, COLUMNS or 80.
    """
    titles = outcome.titles
    rows = [_row(report, titles[report.scheme]) for report in outcome.reports]
    names = rows[0] if rows else ()
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) + GAP for name in names}
    if rows:
        widths["mesh"] = min(widths["mesh"], max(width - sum(widths.values()) + widths["mesh"], LEAST_MESH) + GAP)
        for name in OPTIONAL_COLUMNS:
            if sum(widths.values()) - GAP > width:
                del widths[name]
    total = max(sum(widths.values()) - GAP, 0) or None
    grid = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold", pad_edge=False, width=total)
    for name in widths:
        justify = "left" if name in TEXTS else "right"
        grid.add_column(name, justify=justify, no_wrap=True, width=widths[name] - GAP)
    for report, row in zip(outcome.reports, rows, strict=True):
        verdict = "green" if report.ok else "yellow" if not report.failed or outcome.is_expected(report) else "bold red"
        cells = [Text(row[name], style=verdict if name == "verdict" else "") for name in widths]
        grid.add_row(*cells, style="" if report.ok or outcome.is_expected(report) else "red")
    return grid


def _row(report: Report, title: str) -> dict[str, str]:
    ratio = max((tensor.ratio for tensor in report.tensors), default=float("nan"))
    undecided = f", {report.undecided_examples} undecided" if report.ok and report.undecided_reason else ""
    return {
        "verdict": report.verdict + undecided,
        "scheme": title,
        "error/budget": f"{ratio:.2g}" if report.tensors else "-",
        "examples": str(report.examples),
        "bytes/rank": str(_bytes(report)),
        "forward error": _error(report.worst("output")),
        "gradient error": _error(report.worst("gradient")),
        "mesh": _meshes(report.meshes),
    }


def closing(outcome: Outcome) -> str:
    """The last line: the number of schemes of each kind, including those without a report."""
    judged = len(outcome.reports)
    unexpected = [report for report in outcome.reports if not outcome.is_expected(report)]
    clear = [report for report in unexpected if report.failed and report.engines_disagree is None]
    failures = sum(report.failure is not None for report in clear)
    mismatches = len(clear) - failures
    disagreements = sum(report.engines_disagree is not None for report in unexpected)
    without_verdict = sum(report.is_undecided for report in unexpected)
    undecided = f", {without_verdict} undecided" if without_verdict else ""
    failed = f", {failures} with a failed rank" if failures else ""
    failed += f", {disagreements} on which engines disagree" if disagreements else ""
    expected, passes = judged - len(unexpected), len(outcome.unexpected_passes)
    failed += f", {counted(expected, 'expected failure')}" if expected else ""
    failed += f", {counted(passes, 'unexpected pass')}" if passes else ""
    not_judged = f", {len(outcome.not_judged)} not judged" if outcome.not_judged else ""
    not_offered = f", {len(outcome.not_offered)} not offered" if outcome.not_offered else ""
    meshes = sum(len(report.left_out) for report in outcome.reports)
    omitted = f", {counted(meshes, 'mesh')} left out" if meshes else ""
    schemes = judged + len(outcome.not_run) + len(outcome.not_judged) + len(outcome.not_offered)
    return (
        f"{counted(schemes, 'scheme')}, {counted(mismatches, 'mismatch')}"
        f"{undecided}{failed}, {len(outcome.not_run)} not run{not_judged}{not_offered}{omitted}."
    )


def timing(outcome: Outcome) -> str:
    """The number of examples, the total time, its share in references and ranks, and the slowest schemes."""
    total = sum(outcome.seconds.values())
    tracing, running = (
        sum(getattr(report, name) for report in outcome.reports) for name in ("trace_seconds", "seconds")
    )
    examples = sum(report.examples for report in outcome.reports)
    slowest = sorted(outcome.seconds.items(), key=lambda item: -item[1])[:SLOWEST]
    titles = outcome.titles
    named = ", ".join(f"{titles.get(key, key)} {seconds:.1f} s" for key, seconds in slowest)
    of = f" of {outcome.processes} processes together" if outcome.processes > 1 else ""
    return (
        f"{counted(examples, 'example')} in {total:.0f} s{of}, {tracing / (total or 1.0):.0%} of it tracing references "
        f"and {running / (total or 1.0):.0%} running ranks; slowest: {named}"
    )


def as_json(outcome: Outcome, **fields: Any) -> str:
    """Status, reports, and schemes that were not run or not offered.

    `fields` are added, or replace fields of the same name.
    """
    titles = outcome.titles
    without_report = {name: getattr(outcome, name) for name in ("not_run", "not_judged", "not_offered")}
    record = {
        "status": outcome.status,
        "reports": [_as_dict(report, outcome) for report in outcome.reports],
        **{what: {titles[key]: why for key, why in reasons.items()} for what, reasons in without_report.items()},
    }
    return dumps({**record, **fields}, indent=2)


def _as_dict(report: Report, outcome: Outcome) -> dict[str, Any]:
    expected = outcome.expected.get(report.scheme)
    return {**report.to_dict(), "expected": None if expected is None else asdict(expected)}


def as_junit(outcome: Outcome) -> str:
    """JUnit XML: one test case per scheme; the notes are the failure's text."""
    skipped = {**outcome.not_run, **{key: f"not offered: {reason}" for key, reason in outcome.not_offered.items()}}
    expected = [report for report in outcome.reports if outcome.is_expected(report)]
    wrong = [report for report in outcome.reports if not report.ok and not outcome.is_expected(report)]
    counts = {
        "tests": len(outcome.reports) + len(skipped) + len(outcome.not_judged),
        "failures": len(wrong) + len(outcome.unexpected_passes),
        "errors": len(outcome.not_judged),
        "skipped": len(skipped) + len(expected),
    }
    attributes = {"name": "shardproof", **{what: str(n) for what, n in counts.items()}}
    suite = ElementTree.Element("testsuite", attributes, time=f"{sum(outcome.seconds.values()):.3f}")
    for report in outcome.reports:
        item = _testcase(suite, outcome, report.scheme)
        properties = ElementTree.SubElement(item, "properties")
        worst = max((tensor.ratio for tensor in report.tensors), default=float("nan"))
        for name, value in (
            ("ratio", f"{worst:.3g}"),
            ("examples", report.examples),
            ("undecided", report.undecided_examples),
            ("trace_seconds", f"{report.trace_seconds:.3f}"),
        ):
            ElementTree.SubElement(properties, "property", name=name, value=str(value))
        if report.left_out:
            ElementTree.SubElement(properties, "property", name="left_out", value="; ".join(report.omissions()))
        if outcome.is_expected(report):
            ElementTree.SubElement(item, "skipped", message=f"expected {report.verdict}")
        elif not report.ok:
            ElementTree.SubElement(item, "failure", message=report.verdict).text = str(report)
        elif report.scheme in outcome.expected:
            verdict = outcome.expected[report.scheme].verdict
            ElementTree.SubElement(item, "failure", message=f"passes, {verdict} is expected")
    for key, reason in outcome.not_judged.items():
        ElementTree.SubElement(_testcase(suite, outcome, key), "error", message=reason)
    for key, reason in skipped.items():
        ElementTree.SubElement(_testcase(suite, outcome, key), "skipped", message=reason)
    return ElementTree.tostring(suite, encoding="unicode")


def _testcase(suite: ElementTree.Element, outcome: Outcome, key: str) -> ElementTree.Element:
    """The test case of a scheme: its own time, and the file that declares it."""
    name, attributes = key.rpartition(":")[2], {}
    if key in outcome.places:
        place = outcome.places[key]
        name, parts = place.name, place.path.with_suffix("").parts
        attributes = {
            "classname": ".".join(part for part in parts if part != place.path.anchor),
            "file": str(place.path),
            "line": str(place.line),
        }
    seconds = outcome.seconds.get(key, 0.0)
    return ElementTree.SubElement(suite, "testcase", attributes, name=name, time=f"{seconds:.3f}")


def _meshes(meshes: Sequence[str]) -> str:
    """The tested sizes of each axis: `cp=1,2 tp=1,2,4`."""
    sizes: dict[str, set[int]] = {}
    for axis, _, size in (part.partition("=") for mesh in meshes for part in mesh.split(",") if part):
        sizes.setdefault(axis, set()).add(int(size))
    return " ".join(f"{axis}={','.join(map(str, sorted(tried)))}" for axis, tried in sizes.items())


def _error(tensor: TensorComparison | None) -> str:
    return "-" if tensor is None else f"{tensor.error:.1e} of {tensor.budget:.1e}"


def _bytes(report: Report) -> int:
    """Bytes that the busiest rank hands to collectives in the report's case."""
    ranks = {row.rank for row in report.ledger.rows}
    return max((sum(row.payload for row in report.ledger.of(rank)) for rank in ranks), default=0)
