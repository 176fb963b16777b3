"""The commands that print a case: pictures, replays and timelines."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardproof.declare import discover
from shardproof.declare.case import CaseSpec
from shardproof.declare.counted import counted
from shardproof.declare.declared import Declared
from shardproof.endings.exit_status import EQUAL
from shardproof.engines.ledger import Ledger
from shardproof.replays import case_of, constants_of, load_scheme, reruns
from shardproof.report import picture, summary
from shardproof.report.declared_pictures import pictured_case
from shardproof.report.guard import own_output, without_hiding
from shardproof.report.html_page import page
from shardproof.report.out_path import check_writable, naming, write_text, write_texts
from shardproof.report.report import Report
from shardproof.report.sentence import print_report
from shardproof.report.summary import Outcome
from shardproof.verify_one_case import verify_case


def pictures(target: str, sizes: Mapping[str, Any], figure: str | None, json: str | None = None) -> None:
    """Print the picture of every scheme of a target; `figure` gets the first one."""
    check_writable(figure=figure, json=json)
    schemes = discover.find([target])
    cases = [(scheme, pictured_case(scheme, sizes)) for scheme in schemes]
    for scheme, case in cases if json != "-" else ():
        print(f"{scheme.name}\n{picture.scheme_picture(scheme, case)}\n")
    if json:
        write_text(json, json_module.dumps([json_of_case(scheme, case) for scheme, case in cases], indent=2))
    if figure:
        with naming(figure):
            picture.scheme_figure(*cases[0]).savefig(figure)


def json_of_case(scheme: Declared, case: CaseSpec) -> dict[str, Any]:
    """A picture as JSON: for each sharding, the rank that holds each position; for each other axis, its type."""
    tensors = {
        name: {
            "spec": str(spec),
            "owners": {strip.label: strip.owners.tolist() for strip in strips},
            "types": dict(spec.types),
        }
        for name, spec, strips in picture.scheme_strips(scheme, case)
    }
    return {"name": scheme.name, "mesh": dict(case.mesh), "dims": dict(case.dims), "tensors": tensors}


def replay_file(
    file: str,
    engine: str | None,
    repeat: int,
    json: str | None = None,
    quiet: bool = False,
    verbose: bool = False,
    traceback: bool = False,
    html: str | None = None,
) -> int:
    """Run the case of a replay file `repeat` times and print each report, only its first line if `quiet`.

    Returns the status.
    """
    check_writable(html=html, json=json)
    outcome = Outcome()
    with own_output():
        case, scheme = _recorded(file)
    for report in reruns(scheme, case, engine, repeat):
        outcome.reports.append(report)
        text_stream = sys.stderr if "-" in (html, json) else sys.stdout  # anew if a user's code has closed it
        if quiet:
            print_report(f"{report.scheme.rpartition(':')[2]}: {report.verdict}", text_stream)
        else:
            print_report(report, text_stream)
        if verbose:
            print_report(report.ledger_text(), text_stream)
        if traceback and report.failure is not None and report.failure.traceback:
            print_report(report.failure.traceback, text_stream)
    texts = {
        html: lambda: page([replace(outcome.reports[-1], replay=file)]),
        json: lambda: summary.as_json(outcome),
    }
    with without_hiding(outcome.status):
        write_texts({path: text for path, text in texts.items() if path})
    if html and html != "-" and not quiet:
        print(f"page: {html}", file=sys.stderr if json == "-" else sys.stdout)
    return outcome.status


def timeline(file: str, out: str) -> int:
    """Write the ledger of a replay as trace events, one track per rank, in order of issue."""
    check_writable(out=out)
    report = _replayed(file)
    write_text(out, json_module.dumps(trace_events(report.ledger)))
    if out == "-":
        return EQUAL
    print(f"{counted(len(report.ledger.rows), 'collective')} of {counted(report.case.world, 'rank')} written to {out}")
    return EQUAL


def trace_events(ledger: Ledger) -> dict[str, Any]:
    """Trace-event JSON. Time is the order of issue (1 ms per row): lockstep's clock says nothing about a cluster."""
    events: list[dict[str, Any]] = []
    for index, row in enumerate(ledger.rows):
        detail = {
            "group": row.group_name,
            "seq": row.seq,
            "shapes": [list(s) for s in row.shapes],
            "dtypes": list(row.dtypes),
            "bytes_in": row.bytes_in,
            "bytes_out": row.bytes_out,
        }
        events.append(
            {
                "name": row.op,
                "cat": row.phase,
                "ph": "X",
                "ts": index * 1000,
                "dur": 800,
                "pid": 0,
                "tid": row.rank,
                "args": {**detail, "source": row.source},
            }
        )
    ranks = sorted({row.rank for row in ledger.rows})
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks
    ]
    return {"traceEvents": [*names, *events]}


def _replayed(file: str) -> Report:
    with own_output():
        case, scheme = _recorded(file)
        return verify_case(scheme, case)


def _recorded(file: str) -> tuple[CaseSpec, Declared]:
    """The case and the scheme of a replay file. The file is parsed and not executed."""
    try:
        constants = constants_of(file)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise discover.UnusableTarget(f"cannot read {file}: {reason}") from None
    if not {"CASE", "SOURCE"} <= set(constants):
        raise discover.UnusableTarget(f"{file} is not a replay file: CASE or SOURCE is missing")
    case = case_of(constants["CASE"], file)
    return case, load_scheme(case, constants["SOURCE"], file, constants.get("IMPLEMENTATION"))
