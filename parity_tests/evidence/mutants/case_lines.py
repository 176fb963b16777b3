"""Which lines of production each drawn case of a scheme runs.

Some schemes have a process of their own: coverage.py's tracer must be there before the ranks' threads are. Caches are
emptied before each case, so that no case reads another one's results.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank
os.environ["COVERAGE_CORE"] = "ctrace"

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import coverage

from parity_tests.evidence.injected_bugs.injected_bug import PRODUCTION, ROOT
from parity_tests.evidence.mutants.lines_plugin import empty_caches

Masks = dict[str, dict[str, int]]  # of each file, relative to the root: bit n of a line's number, if case n runs it


def masks_of(keys: Sequence[str], examples: int) -> dict[str, Masks]:
    """The lines that the drawn cases of these schemes run, forward and backward, on any rank of lockstep."""
    recorder = coverage.Coverage(data_file=None, config_file=False, include=[f"{ROOT / PRODUCTION}/*"])
    recorder.set_option("run:disable_warnings", ["no-data-collected"])
    recorder.start()
    from parity_tests.evidence.injected_bugs.trials import drawn_trials
    from shardproof.declare import discover
    from shardproof.engines.engines import run
    from shardproof.engines.program import Program
    from shardproof.engines.speed_advice import without_advice

    with without_advice(), contextlib.redirect_stdout(io.StringIO()):
        for scheme_number, key in enumerate(keys):
            scheme = discover.lookup(key)
            for number, trial in enumerate(drawn_trials(scheme, examples)):
                empty_caches()
                recorder.switch_context(f"{scheme_number} {number}")
                run(Program.of(scheme), trial.case, "lockstep")
                recorder.switch_context("")
    recorder.stop()
    return _by_scheme(recorder.get_data(), keys)


def _by_scheme(data: coverage.CoverageData, keys: Sequence[str]) -> dict[str, Masks]:
    masks: dict[str, Masks] = {key: {} for key in keys}
    for path in sorted(data.measured_files()):
        file = Path(path).relative_to(ROOT).as_posix()
        for line, contexts in data.contexts_by_lineno(path).items():
            for scheme_number, number in (map(int, context.split()) for context in contexts if context):
                of_file = masks[keys[scheme_number]].setdefault(file, {})
                of_file[str(line)] = of_file.get(str(line), 0) | 1 << number
    return masks
