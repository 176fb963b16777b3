"""Follow a run while it is under way: each step is judged as soon as the ranks have left its record."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator

from shardproof.engines.exit_status import INTERRUPTED
from shardproof.training import record, reference
from shardproof.training.judged import Judged, judged
from shardproof.training.run import Run

POLL_S = 0.05  # between two looks for a record


class ReferenceSteps:
    """The reference's steps, made once for all runs that differ in nothing that it knows of."""

    def __init__(self) -> None:
        self._references: list[tuple[Run, list[reference.ReferenceStep], Iterator[reference.ReferenceStep]]] = []

    def steps(self, run: Run) -> Iterator[reference.ReferenceStep]:
        """Those of a run, from the first on."""
        numbers = run.numbers
        if all(before != numbers for before, _, _ in self._references):
            self._references.append((numbers, [], reference.steps(numbers)))
        steps, rest = next((steps, rest) for before, steps, rest in self._references if before == numbers)
        for index in range(run.steps):
            while len(steps) <= index:
                steps.append(next(rest))
            yield steps[index]


class Follower(threading.Thread):
    """Judges steps from `first` on and hands each to `show`, until the last one or until `stop` is set."""

    def __init__(
        self, run: Run, reference_steps: ReferenceSteps, folder: str, first: int, show: Callable[[Judged], None]
    ) -> None:
        super().__init__(daemon=True)
        self._run, self._reference_steps, self._folder, self._first, self._show = (
            run,
            reference_steps,
            folder,
            first,
            show,
        )
        self.stop = threading.Event()
        self.steps: list[Judged] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for expected in self._reference_steps.steps(self._run):
                if expected.step.index >= self._first and not self._judge(expected):
                    return
        except BaseException as error:  # it is raised where the run was started
            self.error = error

    def _judge(self, reference_step: reference.ReferenceStep) -> bool:
        """Wait for the record of a step and judge it; False if there will be none."""
        while (step := record.read(self._folder, reference_step.step.index)) is None:
            if self.stop.wait(POLL_S) and record.read(self._folder, reference_step.step.index) is None:
                return False
        self.steps.append(judged(step, reference_step, self._run.dtype))
        self._show(self.steps[-1])
        return True

    def end(self) -> None:
        """There will be no more records: what is there is judged, and the thread has ended."""
        self.stop.set()
        self.join()

    def leave(self) -> None:
        """Nobody will ask: what is not judged stays so, and a reference that is being compiled is not waited for."""
        self.stop.set()
        atexit.register(self._leave_at_once)

    def _leave_at_once(self) -> None:
        """The interpreter's end would abort a compilation, and the process with it. Ranks end with the process."""
        if self.is_alive():
            os._exit(INTERRUPTED)

    def judged(self) -> list[Judged]:
        """Every step that was judged. Errors: those of the reference."""
        if self.error is not None:
            raise self.error
        return self.steps
