"""The table of a report: a line for each tensor, with notes.

A note on one tensor stands under its line. A note that several tensors have stands once, below the table, under the
names of these tensors. If the headline is such a note, all notes stand below, so that it is read first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from shardproof.explain.places import NO_PATTERN
from shardproof.judge.compare import TensorComparison, index_text
from shardproof.report.sentence import Row, Sentence

if TYPE_CHECKING:
    from shardproof.report.report import Report

COLUMNS = ("verdict", "tensor", "error", "budget", "ratio", "where")
MOST_NAMED = 4  # tensors; if there are more, and all that are wrong, their number is enough


def tensor_table(report: Report) -> list[RenderableType]:
    """A line for each tensor with the notes on it alone, then the notes that stand below."""
    cells = [COLUMNS, *(_cells(report, tensor) for tensor in report.tensors)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    table: list[RenderableType] = [Text(lines[0], style="dim")]
    notes = notes_by_tensors(report)
    first, of_first = next(iter(notes.items()), ((), []))
    is_headline_shared = len(first) > 1 and of_first[0] != NO_PATTERN
    under_lines = {} if is_headline_shared else {labels: each for labels, each in notes.items() if len(labels) == 1}
    for tensor, line in zip(report.tensors, lines[1:], strict=True):
        table.append(Row(line, style="" if tensor.ok else "red"))
        table += [Sentence(f"    {note}") for note in under_lines.get((tensor.label,), ())]
    for labels, below in notes.items():
        if labels not in under_lines:
            table += [Sentence(f"  {names(report, labels)}:"), *(Sentence(f"    {note}") for note in below)]
    return table


def notes_by_tensors(report: Report) -> dict[tuple[str, ...], list[str]]:
    """The notes as they are printed, each once, under the labels of all tensors that have it."""
    labels_of_note: dict[str, list[str]] = {}
    for label, notes in report.notes.items():
        for note in dict.fromkeys(_printed(report, note) for note in notes):
            labels_of_note.setdefault(note, []).append(label)
    by_tensors: dict[tuple[str, ...], list[str]] = {}
    for note, labels in labels_of_note.items():
        by_tensors.setdefault(tuple(labels), []).append(note)
    return by_tensors


def names(report: Report, labels: tuple[str, ...]) -> str:
    """The tensors of a note: `d/d x, d/d w`, or `all 12 wrong tensors`."""
    is_each = len(labels) == len(report.notes)
    return f"all {len(labels)} wrong tensors" if is_each and len(labels) > MOST_NAMED else ", ".join(labels)


def _printed(report: Report, note: str) -> str:
    """The note without words that stand elsewhere in the report: a place, in its line, or another tensor's note."""
    if note.startswith(NO_PATTERN):
        return NO_PATTERN
    other, _, rest = note.removeprefix("see ").partition(": ")
    return f"see {other}" if note.startswith("see ") and rest in report.notes.get(other, ()) else note


def _cells(report: Report, tensor: TensorComparison) -> tuple[str, ...]:
    """The text of each of COLUMNS; the verdict comes first, so that a narrow terminal cannot wrap it away."""
    case = report.case_of_tensor.get(tensor.label, report.case)
    where = f"{index_text(tensor.where)} {case.dtype}"
    if not tensor.ok:
        owner = [
            f"{axis} {coordinate[tensor.where]}" for axis, coordinate in tensor.owners.items() if case.mesh[axis] > 1
        ]
        where += f", owner {' '.join(owner)}" if owner else ""
    return (
        _verdict(report, tensor),
        tensor.label,
        f"{tensor.error:.1e}",
        f"{tensor.budget:.1e}",
        _short(tensor.ratio),
        where,
    )


def _verdict(report: Report, tensor: TensorComparison) -> str:
    if tensor.ok:
        return "equal"
    if report.engines_disagree is not None:
        return f"differs on {report.case.engine}"
    return "undecided" if report.is_undecided else "MISMATCH"


def _short(value: float) -> str:
    """Two digits, as `8.9e5` for 8.9e+05."""
    return f"{value:.2g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
