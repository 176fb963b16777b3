"""What a fault is tried on: drawn cases of healthy schemes with their references, made once and used for all faults.

Production never enters the reference, so that one evaluation serves every fault.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.declare.draws import Chooser
from parity_tests.harness.draw import size_choices
from parity_tests.harness.draw.drawing import draw_case
from parity_tests.harness.judge import oracle
from parity_tests.harness.judge.side_checks import SPARE
from parity_tests.harness.report.report import Report
from parity_tests.harness.run.dtensor_advice import without_advice
from parity_tests.harness.verdict import judge
from parity_tests.injected_bugs import ran

TRACED = 8  # drawn cases that tell which lines a scheme runs
FIXED_WORLD = 2
FIXED_SEEDS = (0, 1, 2)
IN_A_SUBGROUP = 4  # every fourth drawn case stands inside sub-groups of a world twice as large


class Trial:
    """One case of a healthy scheme; its reference is evaluated when it is first asked for."""

    def __init__(self, scheme: Declared, case: CaseSpec) -> None:
        self.scheme, self.case = scheme, case

    @cached_property
    def reference(self) -> oracle.Reference:
        return oracle.evaluate(self.scheme, self.scheme.program(), self.case)

    @cached_property
    def healthy(self) -> Report:
        """The report without any fault."""
        return judge(self.scheme, self.case, reference=self.reference)

    def on(self, patched: Declared, ship: Callable[..., Any] | None = None) -> Report:
        """The report of the same case on a scheme whose code has a fault."""
        return judge(patched, self.case, reference=self.reference, ship=ship)


class Course:
    """The trials of one scheme: `drawn` from the menus of its parity test, `fixed` as a test of one shape has them."""

    def __init__(self, scheme: Declared, examples: int, engine: str = "lockstep") -> None:
        self.scheme = scheme
        cases = drawn_cases(scheme, examples, engine)
        self.drawn = [Trial(scheme, inside(case, i)) for i, case in enumerate(cases)]
        self.fixed = [Trial(scheme, case) for case in fixed_cases(scheme)]

    @cached_property
    def lines(self) -> frozenset[tuple[str, int]]:
        """Lines of production, as (file, number), that the scheme's first cases run."""
        return ran.lines(self.scheme.program(), [trial.case for trial in (*self.drawn[:TRACED], *self.fixed[:1])])

    @without_advice()
    def trace(self) -> None:
        """Find its lines now; otherwise that is done when they are first asked for."""
        _ = self.lines

    @cached_property
    def files(self) -> frozenset[str]:
        return frozenset(file for file, _ in self.lines)

    def runs(self, file: str, first: int, last: int) -> bool:
        """Whether it runs one of the lines first to last of a file."""
        return any((file, number) in self.lines for number in range(first, last + 1))


def drawn_cases(scheme: Declared, examples: int, engine: str) -> list[CaseSpec]:
    """Cases from the menus of the scheme's parity test, the simplest first, each menu gone through evenly.

    Not Hypothesis's own choices: these follow what happens to be imported, and a count should repeat.
    """
    return [draw_case(scheme, even_chooser(number), {}, engine=engine) for number in range(examples)]


def even_chooser(number: int) -> Chooser:
    """The choices of one example: the n-th question takes its options in shuffled rounds, one option an example."""
    question = itertools.count()

    def choose(options: Any) -> Any:
        asked = next(question)
        if not number:
            return options[0]
        turn, place = divmod(number, len(options))
        rng = np.random.Generator(np.random.Philox(key=[asked, turn]))
        return options[int(rng.permutation(len(options))[place])]

    return choose


def inside(case: CaseSpec, number: int) -> CaseSpec:
    """Every fourth case twice over in a larger world: its groups are blocks of ranks, or every other rank."""
    if (number + 1) % IN_A_SUBGROUP:
        return case
    outermost = (number + 1) % (2 * IN_A_SUBGROUP)
    return case.replace(mesh={SPARE: 2, **case.mesh} if outermost else {**case.mesh, SPARE: 2})


def fixed_cases(scheme: Declared) -> list[CaseSpec]:
    """World 2, one shape of the menu, equal shards, normal values, three seeds: a parity test as it is often written.

    None where the scheme has no mesh of two ranks.
    """
    tried = size_choices.meshes(scheme, {}, FIXED_WORLD)
    if not tried:
        return []
    shapes = [
        shape
        for shape in size_choices.shapes(scheme, {}, tried, limit=5)
        if size_choices.compatible(scheme, shape, tried[0])
    ]
    case = draw_case(scheme, _first, {**tried[0], **shapes[len(shapes) // 2]}, dtype="float32", seed=0)
    anywhere = {
        arg.name: {**case.values[arg.name], "picks": [[0, "anywhere"]]}
        for arg in scheme.inputs
        if scheme.draws[arg.name].kind == "ids"
    }
    return [case.replace(values={**case.values, **anywhere}, seed=seed) for seed in FIXED_SEEDS]


def _first(options: Any) -> Any:
    return options[0]
