"""What of production a body runs on lockstep ranks, forward and backward, on any of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.injected_bugs.symbols import ROOT

Place = tuple[str, int]  # a file relative to the root, and a line of it
Body = Callable[[Any, CaseSpec], Any]


def lines(body: Body, cases: Iterable[CaseSpec]) -> frozenset[Place]:
    """Every line that runs."""
    return _places(body, cases, lambda frame: frame.f_lineno, each_line=True)


def functions(body: Body, cases: Iterable[CaseSpec]) -> frozenset[Place]:
    """Where every function begins that is called, decorators included."""
    return _places(body, cases, lambda frame: frame.f_code.co_firstlineno, each_line=False)


def _places(
    body: Body, cases: Iterable[CaseSpec], line: Callable[[FrameType], int], *, each_line: bool
) -> frozenset[Place]:
    production, seen = str(ROOT / "torch_impl"), set[Place]()

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(production):
            return None
        seen.add((frame.f_code.co_filename, line(frame)))
        return note if each_line else None

    def noted(mesh: Any, case: CaseSpec) -> Any:
        before = sys.gettrace()
        sys.settrace(note)
        try:
            return body(mesh, case)
        finally:
            sys.settrace(before)

    for case in cases:
        run(noted, case.replace(engine="lockstep"), "lockstep")
    return frozenset((file.removeprefix(f"{ROOT}/"), number) for file, number in seen)
