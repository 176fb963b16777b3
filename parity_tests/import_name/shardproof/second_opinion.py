"""Verify a failing case again in fresh processes, which share nothing with this one, before it is reported.

Ranks of lockstep are threads of one process. So the ranks, and all schemes of a run, share the state of libraries in
this process. A failing case is run again on gloo. If it passes there, the function may be right, and the report names
other possible causes.

The function itself may keep state from an earlier call. This process has made many calls, so a case can fail here even
if no calling condition was drawn. The case is verified again in fresh processes, after a call with other values or
other sizes. If it fails there, the report and the replay contain the case and the call before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import OTHER_CALLS, record_of, without_other_calls
from shardproof.declare.declared import Declared
from shardproof.declare.discover import TABLE
from shardproof.draw import size_choices
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import another, draw_case
from shardproof.engines.failure import CANNOT_RUN, Deadlock, Modified, NotRun, Shared, Stalled, Unwaited
from shardproof.engines.processes import orphans
from shardproof.engines.protocol import disagreement
from shardproof.replays import write_replay
from shardproof.report.report import OF_ALL_EXAMPLES, Report, mesh_text
from shardproof.verify_one_case import verify_case

MAX_RANKS = 16
FRESH_PROCESS_TIMEOUT_S = 180.0  # a fresh interpreter imports torch and JAX and traces the reference
REMEDY = "bind it in setup=, name its module in isolate=, or verify with --engine gloo"
PASSES_ON_GLOO = (
    "gloo passes this case in fresh processes, so lockstep's result says nothing about the function. Ranks of lockstep "
    f"are threads, which share the state of libraries: {REMEDY}. Or the function uses a buffer before its wait, "
    "which gloo does not see"
)
LIMIT = "it passes there: this is a limit of lockstep, not a verdict on the function"  # the failure names the remedy
SHARES_NOTHING = "gloo passes this case in fresh processes, which share nothing"  # the failure itself names the remedy
PROCESS_CHANGED = (
    "the case passes in a fresh process where no other scheme is verified: a scheme that was imported or verified "
    "earlier has changed this process (a handler, a patched function, a default)"
)
STATE_BETWEEN_CALLS = (
    "the function keeps state between calls: in fresh processes this case passes as the first call and fails after "
    "another call"
)
PASSES_FRESH = (
    "the case passes in fresh processes: an earlier example may have changed state that the function keeps (a cache, a "
    "buffer, a counter)"
)
CARRIED_OUT = "it accepts a call that other backends reject"
VERIFIED: set[str] = set()  # keys of schemes for which this process has drawn cases


def second_opinion(scheme: Declared, report: Report, earlier: CaseSpec | None = None) -> Report:
    """The report of a failing case, with the verdict of fresh processes if they can be started.

    `earlier` is the case before shrinking; the failure may need the other call of that case. Processes of gloo run many
    cases, so a case that failed in them is verified in fresh processes too.
    """
    files = {other.file for other in TABLE.values()}
    has_other_schemes = bool(VERIFIED - {scheme.key} or files - {scheme.file})
    engine = report.case.engine
    if engine not in ("lockstep", "gloo"):
        return report
    reason = _unseen_by_gloo(scheme, report)
    on_gloo = None if reason else _on_fresh_gloo(scheme, report.case)
    if on_gloo is None:
        return _not_repeated(report, reason or "its processes could not be started with this function")
    if isinstance(on_gloo.failure, Stalled) and not isinstance(report.failure, Stalled):
        return _not_repeated(report, "its processes stalled, as on a busy machine, and a stall confirms nothing")
    if on_gloo.verdict == report.verdict or _is_of_gloo_too(report, on_gloo):
        return replace(report, confirmed_on="gloo")
    if on_gloo.verdict != "equal":
        return _not_repeated(report, f"it fails there in another way, {on_gloo.verdict}")
    if isinstance(report.failure, Unwaited) or report.only_unwaited:
        return _not_repeated(report, "there its work was complete when the rank returned, which is not guaranteed")
    if _is_rejection_only(report):
        return _not_repeated(report, CARRIED_OUT)
    if report.failure is not None and CANNOT_RUN in str(report.failure):
        return _not_repeated(report, LIMIT)
    otherwise = _fails_otherwise(scheme, report, on_gloo, earlier)
    if otherwise is not None:
        return otherwise
    if engine == "gloo" and not has_other_schemes:
        return replace(report, not_repeated=PASSES_FRESH)
    if isinstance(report.failure, Shared):
        return _without_verdict(report, SHARES_NOTHING)
    if engine == "lockstep" and not _passes_in_fresh_process(scheme, report):
        return _without_verdict(report, PASSES_ON_GLOO)
    # The engine is not the cause: something before this case has changed its result.
    if has_other_schemes:
        return _without_verdict(report, PROCESS_CHANGED)
    return replace(report, not_repeated=PASSES_FRESH)


def _fails_otherwise(scheme: Declared, report: Report, on_gloo: Report, earlier: CaseSpec | None) -> Report | None:
    """The failing report of the case after another call, or of the case before shrinking; None if none fails."""
    first_calls: dict[CaseSpec, Report | None] = {report.case: on_gloo}
    for case in _after_another_call(scheme, report.case, earlier):
        after = _on_fresh_gloo(scheme, case)
        if after is None or after.ok:
            continue
        first = without_other_calls(case)
        if first not in first_calls:
            first_calls[first] = _on_fresh_gloo(scheme, first)
        as_first = first_calls[first]
        if as_first is not None and as_first.ok:
            return _with_state_between_calls(scheme, report, after, report.case.engine)
        if as_first is not None:
            return _of_another_case(report, as_first, as_first.case)
    return None


def _without_verdict(report: Report, reason: str) -> Report:
    """The report with the verdict `engines disagree`, without the notes on a mismatch."""
    return replace(report, engines_disagree=reason, notes={}, values_to_avoid=())


def _not_repeated(report: Report, reason: str) -> Report:
    """Add the reason why gloo confirms nothing to a lockstep report. A gloo report is from real processes already."""
    return replace(report, not_repeated=reason) if report.case.engine == "lockstep" else report


def _unseen_by_gloo(scheme: Declared, report: Report) -> str | None:
    """Why gloo cannot run the case or cannot see the failure; None if it can."""
    if "gloo" not in scheme.engines:
        return f"the scheme is declared for {', '.join(scheme.engines)} only"
    if report.case.world > MAX_RANKS:
        return f"the case has {report.case.world} ranks, and at most {MAX_RANKS} are started for it"
    if isinstance(report.failure, Deadlock):
        return "there a deadlock cannot be told from a slow rank, and a small message is sent without a receiver"
    if isinstance(report.failure, Modified):
        return "it does not see a buffer that is changed before its wait"
    if report.failure is not None:
        return None
    wrong = [tensor for tensor in report.tensors if not tensor.ok]
    is_poisoned = any((np.isnan(tensor.got) & ~np.isnan(tensor.want)).any() for tensor in wrong)
    if is_poisoned and any(row.is_async for row in report.ledger.rows):
        return "it does not see an output that is read before its wait"
    return None


def _is_rejection_only(report: Report) -> bool:
    """Whether the only failure is a call that real backends reject."""
    if report.failure is not None or report.cost or report.hygiene or not all(tensor.ok for tensor in report.tensors):
        return False
    return bool(report.protocol) and disagreement(report.ledger) is None


def _is_of_gloo_too(report: Report, on_gloo: Report) -> bool:
    """Whether gloo gives the same failure another verdict: `raised` for a rejected call, `died` for an exit."""
    if on_gloo.verdict == "raised":
        return _is_rejection_only(report)
    return on_gloo.verdict == "died" and isinstance(getattr(report.failure, "__cause__", None), SystemExit)


def _on_fresh_gloo(scheme: Declared, case: CaseSpec) -> Report | None:
    """The report of fresh gloo processes; None if they cannot be started or the function cannot be pickled."""
    from shardproof.engines.processes import pool
    from shardproof.engines.processes.forks import ServerGone

    pool.renew(case.world)
    try:
        return verify_case(scheme, case.replace(engine="gloo"))
    except (NotRun, ServerGone, OSError, TypeError):
        return None


def _after_another_call(scheme: Declared, case: CaseSpec, earlier: CaseSpec | None) -> Iterator[CaseSpec]:
    """Cases after another call: calls of the case before shrinking, then calls of other values, then larger calls."""
    if scheme.module is not None:
        return
    first_calls = [without_other_calls(case)]
    if earlier is not None:
        first_calls.append(earlier.replace(conditions={}))
        calls = {name: earlier.conditions[name] for name in OTHER_CALLS if name in earlier.conditions}
        if calls:
            yield earlier.replace(conditions=calls)
            yield earlier
        if earlier.mesh == case.mesh:
            yield from (_after(first_calls[0], record) for record in calls.values())
    # Kept state may be right by chance, for example a count of few elements, so draw several other calls.
    for attempt, is_of_the_same_shapes in ((1, True), (2, False), (3, True), (4, True)):
        for first in dict.fromkeys(first_calls):
            choose = seeded_chooser(first.seed + attempt)
            other = another(scheme, first, first.scheme_mesh, choose, same_shapes=is_of_the_same_shapes)
            yield _after(first, record_of(other))
    # A function that reuses a buffer if it is large enough fails only after a larger call, so make one dim larger.
    for dim in size_choices.free_dims(scheme):
        larger = _of_larger(scheme, first_calls[0], dim)
        if larger is not None:
            yield _after(first_calls[0], record_of(larger))


def _of_larger(scheme: Declared, case: CaseSpec, dim: str) -> CaseSpec | None:
    """A case on the same mesh with one dim doubled, or set to the next declared size; None if that is impossible."""
    size, declared = case.dims[dim], scheme.dims.get(dim)
    sizes = (2 * size,) if declared is None else sorted(n for n in declared if isinstance(n, int) and n > size)
    fixed = {**case.scheme_mesh, **{name: case.dims[name] for name in size_choices.free_dims(scheme)}, **case.options}
    for other in sizes[:1]:
        with suppress(ValueError):  # a dependent size or `assume` does not allow it
            return draw_case(scheme, seeded_chooser(case.seed), {**fixed, dim: other}, dtype=case.dtype)
    return None


def _after(case: CaseSpec, record: Any) -> CaseSpec:
    return case.replace(conditions={**case.conditions, "call_before": record})


def _with_state_between_calls(scheme: Declared, report: Report, after: Report, engine: str) -> Report:
    """The report of a case that fails only after another call. Its replay uses the engine that was verified."""
    if "call_before" in scheme.excluded_conditions:
        return _without_verdict(report, f"{STATE_BETWEEN_CALLS}; the scheme excludes this condition")
    shown = _of_another_case(report, after, after.case.replace(engine=engine))
    return replace(shown, conditions_needed=True, state_between_calls=STATE_BETWEEN_CALLS)


def _of_another_case(report: Report, failing: Report, case: CaseSpec) -> Report:
    """Replace the report of a case that passes in fresh processes by that of a case that fails there."""
    of_all_examples = {name: getattr(report, name) for name in OF_ALL_EXAMPLES}
    return replace(
        failing,
        case=case,
        **of_all_examples,
        meshes=(mesh_text(case.mesh),),
        case_of_tensor={tensor.label: case for tensor in failing.tensors},
        confirmed_on="gloo",
    )


def _passes_in_fresh_process(scheme: Declared, report: Report) -> bool:
    """Whether the case passes on its own engine in a fresh interpreter that imports only the scheme's file."""
    with tempfile.TemporaryDirectory() as folder:
        file, _ = write_replay(scheme, report, folder)
        path = os.pathsep.join(str(Path(entry or ".").resolve()) for entry in sys.path)
        outcome = Path(folder, "outcome.json")  # the scheme's file may print anything
        command = [sys.executable, "-m", "shardproof.cli.app", "replay", file, "--quiet", "--json", str(outcome)]
        environment = os.environ | {"PYTHONPATH": path}
        try:
            subprocess.run(orphans.kept(command), capture_output=True, timeout=FRESH_PROCESS_TIMEOUT_S, env=environment)
            return json.loads(outcome.read_text(encoding="utf-8"))["status"] == 0
        except (OSError, subprocess.TimeoutExpired, ValueError):
            return False
