"""A verdict as a page: one file that needs no network, also shown in notebooks.

First come the findings, each once, then drawings of the case that shows the mistake best: the transfers between ranks,
and each tensor with its errors and owners. Then the smallest case, the command to run it again, and the report as a
terminal prints it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from urllib.parse import quote
from xml.etree.ElementTree import Element

from shardproof.declare.conditions import when
from shardproof.declare.counted import counted
from shardproof.engines.engines import engine_text
from shardproof.engines.ledger import LedgerRow
from shardproof.report.blamed_rows import blamed_rows
from shardproof.report.bytes_table import bytes_table
from shardproof.report.markup import as_text, prose, tag
from shardproof.report.movement_picture import movement
from shardproof.report.page_style import in_notebook, style
from shardproof.report.report import Report, mesh_text, said_once
from shardproof.report.tensor_maps import maps
from shardproof.report.tensor_table import names, notes_by_tensors


def page(
    reports: Sequence[Report],
    closing: str = "",
    without_report: Sequence[str] = (),
    titles: Mapping[str, str] | None = None,
) -> str:
    """A full page with the verdict of each scheme. If there are several schemes, the equal ones are folded.

    `without_report` has one sentence for each scheme that was not run or not judged. `titles` maps a
    scheme's key to a title that no other scheme has; the default title is the scheme's name.
    """
    named = [(report, (titles or {}).get(report.scheme, report.scheme.rpartition(":")[2])) for report in reports]
    others = [tag("p", sentence, class_="quiet") for sentence in without_report]
    if len(reports) == 1:
        title, parts = f"{named[0][1]}: {reports[0].verdict}", [_section(*named[0]), *others]
    else:
        title = closing or "No verdict"
        failed_first = sorted(named, key=lambda item: item[0].ok)
        parts = [tag("h1", title), _table(failed_first), *others, *(_folded(*item) for item in failed_first)]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} - shardproof"),
        tag("style", style()),
    )
    versions = f"torch {version('torch')}, jax {version('jax')}, Python {platform.python_version()}"
    body = tag("body", *parts, tag("p", versions, class_="quiet"), class_="shardproof")
    return "<!DOCTYPE html>\n" + as_text(tag("html", head, body, lang="en"))


def fragment(report: Report) -> str:
    """The HTML of a report in a notebook. The text comes first, and stays if the pictures are removed."""
    text = tag("pre", str(report))
    return in_notebook(text, tag("details", tag("summary", "the case, drawn"), *_pictures(report), open=""))


def _anchor(title: str) -> str:
    return f"scheme-{quote(title, safe='/:')}"  # a path may contain spaces, an HTML id may not


def _table(named: Sequence[tuple[Report, str]]) -> Element:
    rows = [
        tag(
            "tr",
            tag("td", tag("a", title, href=f"#{_anchor(title)}")),
            tag("td", _verdict(report)),
            tag("td", *prose(report.headline)),
        )
        for report, title in named
    ]
    head = tag("tr", *(tag("th", name) for name in ("scheme", "verdict", "what is wrong")))
    return tag("div", tag("table", head, *rows), class_="wide")


def _folded(report: Report, title: str) -> Element:
    """A scheme on a page of several: in full if it failed, else only its facts and transfers, folded."""
    if not report.ok:
        return tag("section", _section(report, title))
    summary = tag("summary", title, " ", _verdict(report))
    return tag("details", summary, _facts(report), *_exchanges(report), id=_anchor(title))


def _section(report: Report, title: str) -> Element:
    return tag(
        "div",
        tag("h1", title, " ", _verdict(report)),
        *_findings(report),
        _facts(report),
        *_pictures(report),
        *_replay(report),
        tag("details", tag("summary", "As in the terminal"), tag("pre", str(report), class_="terminal")),
        id=_anchor(title),
    )


def _verdict(report: Report) -> Element:
    """The verdict in one word, with a sign in addition to the colour."""
    sign, kind = ("\N{CHECK MARK}", "right") if report.ok else ("\N{BALLOT X}", "wrong")
    return tag("span", f"{sign} {report.verdict}", class_=f"verdict {kind}")


def _clearest(report: Report) -> Report:
    """The report of a larger case that shows more of the mistake, else `report`."""
    return report if report.clearer_report is None else report.clearer_report


def _facts(report: Report) -> Element:
    """The tested examples, meshes and dtypes in one line, and further observations."""
    count = counted(report.examples, "example")
    meshes = " ".join(report.meshes) or mesh_text(report.case.mesh)
    dtypes = " ".join(report.dtypes or (report.case.dtype,))
    confirmed = f"; {report.confirmation}" if report.confirmation else ""
    at = f"; declared at {report.source}" if report.source else ""
    return tag(
        "p", f"{count} on {meshes}, {engine_text(report.case, report.meshes)}, {dtypes}{confirmed}{at}", class_="quiet"
    )


def _findings(report: Report) -> list[Element]:
    """Each finding once, and the blamed lines that no finding names."""
    sentences = [str(report.failure)] if report.failure is not None else []
    sentences += [f"engines disagree: {report.engines_disagree}"] if report.engines_disagree is not None else []
    sentences += [*report.protocol, *report.cost, *said_once(report.hygiene)]
    sentences += [report.undecided_reason] if report.is_undecided and report.undecided_reason else []
    notes = [
        tag("li", tag("b", names(report, labels)), ": ", *prose(note))
        for labels, of_tensors in notes_by_tensors(report).items()
        for note in of_tensors
    ]
    lines = [line for sentence in sentences for line in sentence.splitlines()]
    rows = blamed_rows(_clearest(report), report)
    said = " ".join([*lines, *(note for of_tensor in report.notes.values() for note in of_tensor)])
    blamed = dict.fromkeys(f"{row.op} at {row.source}" for row in rows if row.source not in said)
    items = [*notes, *(tag("li", *prose(line)) for line in lines)]
    return [
        *([tag("ul", *items, class_="wrong")] if items else []),
        *([tag("p", tag("span", "blamed", class_="badge"), " ", tag("code", ", ".join(blamed)))] if blamed else []),
    ]


def _pictures(report: Report) -> list[Element]:
    """The clearest case in full, and the smallest case if it is a different case."""
    example = _clearest(report)
    blamed = blamed_rows(example, report)
    what = "The clearest case" if example is not report else _kind(report)
    parts = [tag("h2", f"{what}: {_case(example)}"), *_exchanges(example, blamed)]
    parts += [tag("h2", "Tensors"), maps(example)] if example.tensors else []
    if example is not report:
        summary = tag("summary", f"{_kind(report)}: {_case(report)}")
        parts.append(tag("details", summary, *_exchanges(report, blamed_rows(report)), maps(report)))
    return parts


def _kind(report: Report) -> str:
    if report.ok:
        return "One of the cases"
    return f"The {report.kind_of_case}"


def _case(report: Report) -> str:
    return report.case_text + when(report.case)


def _exchanges(report: Report, blamed: Sequence[LedgerRow] = ()) -> list[Element]:
    """The transfers, drawn and counted."""
    return [
        tag("h3", "What the ranks hand to each other"),
        movement(report.ledger, blamed, report.case.world),
        tag("h3", "Calls and bytes"),
        bytes_table(report),
    ]


def _replay(report: Report) -> list[Element]:
    """How to run the case again: a failure's replay file, else lines for a notebook."""
    parts = [tag("h2", "Run it again")]
    if report.replay:
        commands = f"python {report.replay}\nshardproof replay {report.replay} --engine gloo"
        parts.append(tag("pre", commands))
    example = _clearest(report)
    call = f"verify_case({report.scheme.rpartition(':')[2]}, CaseSpec.from_json({example.case.json!r}))"
    lines = f"from shardproof import CaseSpec, verify_case\n\n{call}"
    which = "The clearest case, in Python:" if example is not report else "In Python:"
    return [*parts, tag("p", which), tag("pre", lines)]
