"""Which lines of a user's code the ranks run, and what the names of each function hold there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ml_dtypes
import numpy as np
import torch

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.engines.engines import run
from shardproof.engines.failure import RankFailure
from shardproof.engines.ledger import is_plumbing
from shardproof.engines.program import Program, RankResult

# What draws the inputs and computes for the ranks.
_LIBRARIES = ("<", *(str(Path(module.__file__ or "<").parent) for module in (np, ml_dtypes)))


@dataclass
class Running:
    """A function that ranks run: its lines, the kind of value of each local name, whether a backward calls it."""

    lines: set[int] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)
    in_backward: bool = False


Functions = dict[CodeType, Running]


@dataclass(frozen=True)
class _TracedProgram(Program):
    """A program whose ranks record the user's functions that they run."""

    functions: Functions = field(default_factory=dict)

    def __call__(self, mesh: Any, case: CaseSpec) -> RankResult:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            return super().__call__(mesh, case)
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if is_plumbing(code.co_filename) or code.co_filename.startswith(_LIBRARIES):
            return None
        running = self.functions.setdefault(code, Running())
        running.in_backward |= torch._C._current_graph_task_id() != -1

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            running.lines.add(frame.f_lineno)
            if event == "return":
                running.kinds.update({name: kind for name, value in frame.f_locals.items() if (kind := _kind(value))})
            return line

        return line


def running_functions(scheme: Declared, case: CaseSpec, caches: Iterable[Any] = ()) -> Functions:
    """Run the case once, on lockstep, with empty caches: the user's functions that any rank runs, backward included."""
    program, functions = Program.of(scheme), Functions()
    traced = _TracedProgram(**{each.name: getattr(program, each.name) for each in fields(program)}, functions=functions)
    for cache in caches:
        cache.cache_clear()
    try:
        run(traced, case, case.engine)
    except RankFailure:
        return {}
    return functions


def _kind(value: Any) -> str:
    """What may stand for a value in an edit: an integer for an integer, a tensor for one with as many dims."""
    if isinstance(value, torch.Tensor):
        what = "floats" if value.is_floating_point() else "flags" if value.dtype == torch.bool else "integers"
        return f"tensor of {what}, {value.dim()}"
    if isinstance(value, bool | int | float | slice):
        return type(value).__name__
    return "group" if hasattr(value, "rank") and hasattr(value, "size") else ""
