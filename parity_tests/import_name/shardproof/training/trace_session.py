"""One call of `shardproof trace`: compare the first step of a run, tensor by tensor."""

from __future__ import annotations

from shardproof.declare.case import ENGINES
from shardproof.engines.failure import RankFailure
from shardproof.judge import bridge
from shardproof.report.out_path import check_writable
from shardproof.tracing import show
from shardproof.training import traced
from shardproof.training.run import Run
from shardproof.training.show import named

LOCAL_ENGINES = tuple(engine for engine in ENGINES if engine != "torchrun")  # a trace runs on one machine


def trace(run: Run, engine: str, json: str | None, is_whole: bool, quiet: bool = False) -> int:
    """Trace, print, and return the exit status. `json` is the path for JSON; `is_whole` prints every line."""
    if engine not in LOCAL_ENGINES:
        raise ValueError(f"--engine {engine!r} is not one of {', '.join(LOCAL_ENGINES)}")
    check_writable(json=json)
    bridge.start()
    reference_trace = traced.trace_reference(run)
    try:
        report = show.TraceReport(named(run), "on one device", traced.trace(run, reference_trace, engine))
    except RankFailure as failure:
        report = show.TraceReport(named(run), "on one device", failure=failure)
    show.print_report(show.console(json), report, is_whole, quiet)
    return show.write([report], json)
