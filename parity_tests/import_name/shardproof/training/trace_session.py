"""One call of `shardproof trace`: the first step of a run, tensor by tensor, and where it first differs."""

from __future__ import annotations

from shardproof.declare.case import ENGINES
from shardproof.engines.failure import RankFailure
from shardproof.judge import bridge
from shardproof.report.out_path import check_writable
from shardproof.tracing import show
from shardproof.training import traced
from shardproof.training.run import Run
from shardproof.training.show import named

HERE = tuple(engine for engine in ENGINES if engine != "torchrun")  # one step on one machine says where it differs


def trace(run: Run, engine: str, json: str | None, is_whole: bool, quiet: bool = False) -> int:
    """Trace, print, and return the exit status. `json` is where that goes; `is_whole` prints every line."""
    if engine not in HERE:
        raise ValueError(f"--engine {engine!r} is not one of {', '.join(HERE)}")
    check_writable(json=json)
    bridge.start()
    reference_trace = traced.known_of(run)
    try:
        report = show.TraceReport(named(run), "on one device", traced.trace(run, reference_trace, engine))
    except RankFailure as failure:
        report = show.TraceReport(named(run), "on one device", failure=failure)
    show.print_report(show.console(json), report, is_whole, quiet)
    return show.write([report], json)
