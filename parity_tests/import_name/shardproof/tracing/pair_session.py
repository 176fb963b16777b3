"""One call of `shardproof trace FILE`: every pair that a file declares, and where each first differs."""

from __future__ import annotations

from shardproof.declare import discover
from shardproof.engines.failure import RankFailure
from shardproof.judge import bridge
from shardproof.judge.reference import UNIT_ROUNDOFF, ReferenceFailure
from shardproof.report.guard import own_output
from shardproof.report.out_path import check_writable
from shardproof.tracing import show
from shardproof.tracing.pair import Pair, traced_pair


def trace(file: str, dtype: str | None, json: str | None, is_whole: bool, quiet: bool) -> int:
    """Trace, print, and return the worst exit status of all pairs.

    Errors: UnusableTarget for a file without a pair; a pair's ReferenceFailure and ValueError, with its name.
    """
    if dtype is not None and dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"--dtype {dtype!r} is not one of {', '.join(UNIT_ROUNDOFF)}")
    check_writable(json=json)
    bridge.start()
    console, done = show.console(json), []
    with own_output():
        pairs = pairs_of_file(file)
    for name, pair in pairs.items():
        with own_output():
            done.append(_report_of(name, pair, dtype))
        show.print_report(console, done[-1], is_whole, quiet)
    return show.write(done, json)


def pairs_of_file(file: str) -> dict[str, Pair]:
    """The pairs that a file assigns to names, in its order. Errors: UnusableTarget."""
    module = discover.module_of_file(file)
    pairs = {name: value for name, value in vars(module).items() if isinstance(value, Pair)}
    if not pairs:
        raise discover.UnusableTarget(
            f"{file}: declares no pair; write one as NAME = Pair(torch_module, make_flax, inputs)"
        )
    return pairs


def _report_of(name: str, pair: Pair, dtype: str | None) -> show.TraceReport:
    title = f"{name}  {dtype or pair.dtype}"
    try:
        traced = traced_pair(pair, dtype)
    except RankFailure as failure:
        return show.TraceReport(title, "in flax", failure=failure)
    except ReferenceFailure as failure:
        raise ReferenceFailure(f"pair '{name}': {failure}") from failure
    except ValueError as error:
        raise ValueError(f"pair '{name}': {error}") from error
    names = {pair.flax_name(ours): ours for ours, _ in pair.torch_module.named_modules()}
    differing = {theirs: ours for theirs, ours in names.items() if theirs != ours}
    return show.TraceReport(title, "in flax", traced.lines, None, differing, traced.torch_only, traced.flax_only)
