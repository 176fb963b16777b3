"""A second opinion on a scheme, line by line: the types of its tensors on each axis, by `spmd-types`.

A type says of a tensor on an axis whether the ranks have shards of it (V), copies whose gradients add up (R) or are
the same (I), or terms of a sum (P). Where two types do not go together, as a term in a ReLU, the line is wrong whatever
the numbers are. The verdict compares numbers, and says nothing of a line; types see no numbers.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.declare.travel import CannotTravel, dumps
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.engines.processes import orphans
from shardproof.engines.program import Program
from shardproof.report.report import Report

TIMEOUT_S = 60.0  # a fresh interpreter imports torch, and the checker torch's compiler
INSTALL = "install the extra types: pip install 'shardproof[types]'"
CLASHES = ("line ", "output ")  # how a sentence about two types that do not go together begins
COULD_NOT = "could not type it"


def is_installed() -> bool:
    """Whether `spmd-types` can be imported."""
    return find_spec("spmd_types") is not None


def with_types(scheme: Declared, report: Report, *, asked: bool) -> Report:
    """The report with the sentence of `types_of`; if nobody `asked` for it, only with a clash in a failing scheme."""
    if not asked and (report.ok or not is_installed()):
        return report
    sentence = types_of(scheme, report.case)
    return replace(report, types=sentence) if asked or sentence.startswith(CLASHES) else report


def types_of(scheme: Declared, case: CaseSpec | None = None) -> str:
    """One sentence: where the types of a scheme clash, that they agree, or why they cannot be followed.

    `case` has the sizes. On one rank all types mean the same: for such a case another one on a larger mesh is drawn.
    Types take no notice of a layout that permutes: its axis is not typed.

    Cost: a process of its own, four seconds; at most TIMEOUT_S.
    """
    try:
        chosen = case if case is not None and case.world > 1 else case_on_ranks(scheme, case)
        task = pickle.dumps((dumps(Program.of(scheme)), chosen.replace(conditions={})))
    except (CannotTravel, ValueError) as reason:
        return f"{COULD_NOT}: {reason}"
    path = os.pathsep.join(str(Path(entry or ".").resolve()) for entry in sys.path)
    command = [sys.executable, "-W", "ignore", "-m", "shardproof.line_types.body"]
    environment = os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(
            orphans.kept(command), input=task, capture_output=True, timeout=TIMEOUT_S, env=environment
        )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"{COULD_NOT}: it took longer than {TIMEOUT_S:.0f} s"
    except (OSError, ValueError):
        return f"{COULD_NOT}: its process ended without a word"


def case_on_ranks(scheme: Declared, case: CaseSpec | None = None) -> CaseSpec:
    """A case with two ranks on each axis that can have two; if none is found, the first case on two ranks or more.

    Errors: ValueError if the scheme has no such mesh.
    """
    options: dict[str, Any] = {} if case is None else dict(case.options)
    two = {axis: 2 for axis, sizes in scheme.mesh.items() if 2 in sizes}
    for fixed in (two | options, options, {}):
        for seed in range(8):
            with suppress(ValueError):
                drawn = draw_case(scheme, seeded_chooser(seed), fixed, seed=seed)
                if drawn.world > 1:
                    return drawn
    raise ValueError("it has no mesh of two ranks")
