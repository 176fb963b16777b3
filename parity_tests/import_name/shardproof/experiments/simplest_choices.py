"""The simplest case: replace choices by their first option, then by earlier ones, while the case still fails.

Options are in order of simplicity: small meshes and shapes before large ones, equal shards before ragged ones, no
calling condition before any. `smallest.shrink` then goes on to sizes that no menu contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.declare.draws import Chooser
from shardproof.draw.choosers import Choice, RecordingChooser, shrunk_example, simplest
from shardproof.endings.raised import none_if_raised, pass_interrupt
from shardproof.experiments.smallest import fails_alike
from shardproof.report.report import Report

MAX_RUNS = 60
EXAMPLES_OF_A_STRATEGY = 30


class SimplestCase:
    """Searches the cases that `draw` makes from choices for the simplest with the same failure as `report`."""

    def __init__(
        self,
        draw: Callable[[Chooser], CaseSpec],
        verify: Callable[[CaseSpec], Report],
        report: Report,
        choices: Sequence[Choice],
    ) -> None:
        # They return None if the draw, the reference or the cost raises: that is no simpler case.
        self.draw, self.verify = none_if_raised(draw), none_if_raised(verify)
        self.report, self.choices = report, list(choices)
        self.runs = 0
        self._tried = {report.case.json}
        self._shrunk = set[int]()  # indices of choices whose example Hypothesis has shrunk

    def search(self) -> Report:
        """The report of the simplest case, after at most MAX_RUNS runs, plus those for examples of strategies."""
        # 1. Find how many of the first choices are needed to fail, with the simplest option for the rest.
        few, many = -1, len(self.choices)
        while many - few > 1:
            middle = (few + many) // 2
            if self._is_taken(self.choices[:middle]):
                many = middle
            else:
                few = middle
        # 2. Simplify each choice by itself, until none can be simpler; values before sizes, because small cases need
        # special values.
        while len(self._tried) <= MAX_RUNS:
            if not any([self._simplify(number) for number in reversed(range(len(self.choices)))]):
                break
        return self.report

    def _simplify(self, number: int) -> bool:
        """Replace one of the choices by a simpler one if possible; True if it was replaced."""
        if number >= len(self.choices):
            return False
        choice = self.choices[number]
        if choice.strategy is not None:
            return self._shrink_example(number, choice)
        simpler = [Choice(place) for place in sorted({0, choice.place // 2, choice.place - 1} - {choice.place, -1})]
        return any(self._is_taken(choices) for other in simpler for choices in self._with_aligned(number, other))

    def _with_aligned(self, number: int, choice: Choice) -> Iterator[list[Choice]]:
        """The choices with one replaced; if others then appear or disappear, first with later ones shifted to fit."""
        plain = self._with(number, choice)
        chooser = RecordingChooser(simplest, plain)
        self.draw(chooser)
        more = len(chooser.choices) - len(self.choices)
        if more:
            rest = self.choices[number + 1 + max(-more, 0) :]
            yield [*self.choices[:number], choice, *[Choice()] * more, *rest]
        yield plain

    def _shrink_example(self, number: int, choice: Choice) -> bool:
        """Whether Hypothesis finds a simpler example of the strategy."""
        if number in self._shrunk:
            return False
        self._shrunk.add(number)

        def fails(example: Any) -> bool:
            choices = self._with(number, choice._replace(example=example))
            case = self.draw(RecordingChooser(simplest, choices))
            return case is not None and self._failing(case) is not None

        try:
            example = shrunk_example(choice.strategy, fails, EXAMPLES_OF_A_STRATEGY)
        except BaseException as error:  # Hypothesis finds no example, or the strategy cannot draw another
            pass_interrupt(error)
            return False
        # Verify it once more to record its choices.
        return self._is_taken(self._with(number, choice._replace(example=example)))

    def _with(self, number: int, choice: Choice) -> list[Choice]:
        return [*self.choices[:number], choice, *self.choices[number + 1 :]]

    def _is_taken(self, choices: Sequence[Choice]) -> bool:
        """Whether these choices give a new case with the same failure, which is then the simplest so far."""
        chooser = RecordingChooser(simplest, choices)
        case = self.draw(chooser)
        if case is None or case.json in self._tried or len(self._tried) > MAX_RUNS:
            return False
        self._tried.add(case.json)
        report = self._failing(case)
        if report is not None:
            self.report, self.choices = report, chooser.choices
        return report is not None

    def _failing(self, case: CaseSpec) -> Report | None:
        """The report of a case if it fails like the first one."""
        self.runs += 1
        report = self.verify(case)
        return report if report is not None and fails_alike(report, self.report) else None
