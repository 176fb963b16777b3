"""The cases that a bug is tried on, with their references, and the lines of production that each scheme executes.

The cases are drawn once for all bugs. A reference contains no production code, so one evaluation serves every bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cached_property
from types import FrameType
from typing import Any

import torch

from parity_tests.evidence.injected_bugs.injected_bug import PRODUCTION, ROOT
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw import size_choices
from shardproof.draw.choosers import even_chooser, simplest
from shardproof.draw.drawing import draw_case
from shardproof.engines.engines import run
from shardproof.engines.program import Program
from shardproof.engines.speed_advice import without_advice
from shardproof.experiments.undecided import mark_undecided
from shardproof.judge.reference import Reference, evaluate
from shardproof.judge.side_checks import SPARE
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

TRACED = 8  # drawn cases that tell which lines a scheme runs
FIXED_WORLD = 2
FIXED_SEEDS = (0, 1, 2)
# Seconds between two collectives: a rank that is traced, or has no core for itself, is slow and not stalled.
QUIET_S = 300.0
IN_A_SUBGROUP = 4  # every fourth drawn case stands inside sub-groups of a world twice as large

CodePlace = tuple[str, int]  # a file relative to the root, and a line of it
Body = Callable[[Any, CaseSpec], Any]


class Trial:
    """One case of a healthy scheme; its reference is evaluated at the first use."""

    def __init__(self, scheme: Declared, case: CaseSpec) -> None:
        self.scheme, self.case = scheme, case

    @cached_property
    def reference(self) -> Reference:
        return evaluate(self.scheme, Program.of(self.scheme), self.case)

    @cached_property
    def healthy(self) -> Report:
        """The report without any bug; it may be undecided."""
        report = verify_case(self.scheme, self.case, reference=self.reference, quiet_s=QUIET_S)
        return report if report.ok else mark_undecided(self.scheme, report)

    def on(
        self,
        patched: Declared,
        wrap_program: Callable[..., Any] | None = None,
        quiet_s: float | None = None,
    ) -> Report:
        """The report of the same case on a scheme with a bug in its code."""
        return verify_case(patched, self.case, reference=self.reference, wrap_program=wrap_program, quiet_s=quiet_s)


class SchemeTrials:
    """The trials of one scheme: `drawn` from the menus of its parity test, `fixed` with one shape."""

    def __init__(self, scheme: Declared, examples: int, engine: str = "lockstep", traced: int = TRACED) -> None:
        self.scheme, self.examples, self.engine, self.traced = scheme, examples, engine, traced

    @cached_property
    def drawn(self) -> list[Trial]:
        return drawn_trials(self.scheme, self.examples, self.engine)

    @cached_property
    def fixed(self) -> list[Trial]:
        return [Trial(self.scheme, case) for case in fixed_cases(self.scheme)]

    @cached_property
    def lines(self) -> frozenset[tuple[str, int]]:
        """Lines of production, as (file, number), that the scheme's first cases run."""
        # Most schemes are traced and never tried, so that few cases are drawn here.
        trials = (*drawn_trials(self.scheme, min(self.traced, self.examples), self.engine), *self.fixed[:1])
        return executed_lines(Program.of(self.scheme), [trial.case for trial in trials])

    @without_advice()
    def trace(self) -> None:
        """Find the scheme's lines now instead of at their first use."""
        _ = self.lines

    def runs(self, file: str, numbers: Iterable[int] | None = None) -> bool:
        """Whether the scheme runs one of these lines of a file; without numbers, any line of it."""
        if numbers is None:
            return any(file == each for each, _ in self.lines)
        return any((file, number) in self.lines for number in numbers)


def drawn_trials(scheme: Declared, examples: int, engine: str = "lockstep") -> list[Trial]:
    """Trials of the drawn cases, some of them inside a larger world."""
    cases = drawn_cases(scheme, examples, engine)
    return [Trial(scheme, inside(case, number)) for number, case in enumerate(cases)]


def drawn_cases(scheme: Declared, examples: int, engine: str) -> list[CaseSpec]:
    """Cases from the menus of the scheme's parity test, the simplest first; each choice comes equally often."""
    return [
        draw_case(scheme, even_chooser(number), {}, engine=engine, with_conditions=True) for number in range(examples)
    ]


def inside(case: CaseSpec, number: int) -> CaseSpec:
    """Put every fourth case into a world twice as large, where its groups are blocks of ranks or every other rank."""
    if (number + 1) % IN_A_SUBGROUP:
        return case
    outermost = (number + 1) % (2 * IN_A_SUBGROUP)
    return case.replace(mesh={SPARE: 2, **case.mesh} if outermost else {**case.mesh, SPARE: 2})


def fixed_cases(scheme: Declared) -> list[CaseSpec]:
    """Draw the cases of a usual parity test: world 2, one shape, equal shards, normal values, three seeds.

    Empty if the scheme has no mesh of two ranks.
    """
    tried = size_choices.meshes(scheme, {}, FIXED_WORLD)
    if not tried:
        return []
    shapes = [
        shape
        for shape in size_choices.shapes(scheme, {}, tried, limit=5, with_pairs=False)
        if size_choices.compatible(scheme, shape, tried[0])
    ]
    dtype = "float32" if "float32" in scheme.dtypes else scheme.dtypes[0]
    case = draw_case(scheme, simplest, {**tried[0], **shapes[len(shapes) // 2]}, dtype=dtype, seed=0)
    anywhere = {
        arg.name: {**case.values[arg.name], "picks": [[0, "anywhere"]]}
        for arg in scheme.inputs
        if scheme.draws[arg.name].kind == "ids"
    }
    return [case.replace(values={**case.values, **anywhere}, seed=seed) for seed in FIXED_SEEDS]


def executed_lines(body: Body, cases: Iterable[CaseSpec]) -> frozenset[CodePlace]:
    """The lines of production that a body runs on any lockstep rank, forward and backward."""
    return _places(body, cases, lambda frame: frame.f_lineno, each_line=True)


def executed_functions(body: Body, cases: Iterable[CaseSpec]) -> frozenset[CodePlace]:
    """The first line, decorators included, of each function of production that a body calls."""
    return _places(body, cases, lambda frame: frame.f_code.co_firstlineno, each_line=False)


def _places(
    body: Body, cases: Iterable[CaseSpec], line: Callable[[FrameType], int], *, each_line: bool
) -> frozenset[CodePlace]:
    production, seen = str(ROOT / PRODUCTION), set[CodePlace]()

    def record(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(production):
            return None
        seen.add((frame.f_code.co_filename, line(frame)))
        return record if each_line else None

    def traced_body(mesh: Any, case: CaseSpec) -> Any:
        before = sys.gettrace()
        sys.settrace(record)
        try:
            return body(mesh, case)
        finally:
            sys.settrace(before)

    # Eager: a trace of torch's compiler takes minutes, and compiled code runs no line of Python.
    with torch.compiler.set_stance("force_eager"):
        for case in cases:
            run(traced_body, case.replace(engine="lockstep"), "lockstep", quiet_s=QUIET_S)
    return frozenset((file.removeprefix(f"{ROOT}/"), number) for file, number in seen)
