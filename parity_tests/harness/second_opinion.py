"""A failure is judged once more before it is reported: in fresh processes, which share nothing with this one.

Ranks of lockstep are threads of one process, so state that a library keeps for its process is shared by ranks, and by
the schemes of one run. A failing case is run on gloo; where it passes there, lockstep's verdict is no verdict on the
function, and the report says what else it may come from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.declare.discover import TABLE
from parity_tests.harness.replay import write_replay
from parity_tests.harness.report.report import Report
from parity_tests.harness.run.failure import Deadlock, NotRun, Unwaited
from parity_tests.harness.run.protocol import disagreement
from parity_tests.harness.verdict import judge

MOST_RANKS = 16
ALONE_S = 180.0  # for a fresh interpreter, which imports torch and JAX and compiles the reference
REMEDY = "bind it in setup=, name its module in isolate=, or verify with --engine gloo"
SHARED = (
    "gloo passes this case in fresh processes, so lockstep's result is no verdict on the function. Ranks of lockstep "
    f"are threads, which share what a library keeps for its process: {REMEDY}. Or a buffer is used before its wait, "
    "which gloo does not see"
)
LEFT_OVER = (
    "the case passes in a fresh process where its scheme is verified alone: one that was imported or verified before "
    "has left something changed in this process (a handler, a patched function, a default)"
)
VERIFIED: set[str] = set()  # keys of the schemes that this process has verified


def second_opinion(scheme: Declared, report: Report) -> Report:
    """The report of a failing case, with the verdict of fresh processes on it where they can be started.

    On gloo, whose processes serve one scheme after another, it is judged again if they have served another one.
    """
    files = {other.file for other in TABLE.values()}
    others = bool(VERIFIED - {scheme.key} or files - {scheme.file})
    engine = report.case.engine
    if engine != "lockstep" and not (engine == "gloo" and others):
        return report
    if "gloo" not in scheme.engines or report.case.world > MOST_RANKS or not _may_be_contested(report):
        return report
    verdict = _verdict_of_gloo(scheme, report)
    if verdict is None:
        return report
    if verdict != "equal":
        return replace(report, confirmed_on="gloo" if verdict == report.verdict else f"gloo ({verdict})")
    is_left_over = engine == "gloo" or (others and _passes_alone(scheme, report))
    return replace(report, contested=LEFT_OVER if is_left_over else SHARED, notes={})


def _may_be_contested(report: Report) -> bool:
    """Whether gloo could see what is wrong.

    It does not see work that is never waited for or an output that is read before its wait, it buffers small messages
    where NCCL waits for the receiver, and it carries out what other backends reject.
    """
    if isinstance(report.failure, Unwaited | Deadlock):
        return False
    if report.failure is not None:
        return True
    wrong = [row for row in report.rows if not row.ok]
    is_poisoned = any((np.isnan(row.got) & ~np.isnan(row.want)).any() for row in wrong)
    if is_poisoned and any(row.is_async for row in report.ledger.rows):
        return False
    is_rejected_alone = bool(report.protocol) and disagreement(report.ledger) is None
    return bool(wrong or report.cost or report.hygiene) or not is_rejected_alone


def _verdict_of_gloo(scheme: Declared, report: Report) -> str | None:
    """What fresh gloo processes make of the case; None where they cannot be started or the function cannot travel."""
    from parity_tests.harness.run.processes import pool
    from parity_tests.harness.run.processes.forks import ServerGone

    pool.renew(report.case.world)
    try:
        return judge(scheme, report.case.replace(engine="gloo")).verdict
    except (NotRun, ServerGone, OSError, TypeError):
        return None


def _passes_alone(scheme: Declared, report: Report) -> bool:
    """Whether the case passes on its own engine in a fresh interpreter that imports the scheme's file alone."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_replay(scheme, report, folder)
        path = os.pathsep.join(str(Path(entry or ".").resolve()) for entry in sys.path)
        command = [sys.executable, "-m", "parity_tests.cli.app", "replay", file, "--quiet", "--json", "-"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=ALONE_S, env=os.environ | {"PYTHONPATH": path}
            )
            return json.loads(done.stdout)["status"] == 0
        except (OSError, subprocess.TimeoutExpired, ValueError):
            return False
