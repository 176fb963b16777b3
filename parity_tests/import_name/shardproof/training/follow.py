"""Judge each step of a run as soon as the ranks have written its record."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator

from shardproof.endings.exit_status import INTERRUPTED
from shardproof.training import record, reference
from shardproof.training.judged import Judged, judged
from shardproof.training.run import Run

POLL_S = 0.05  # between two checks for a record


class ReferenceSteps:
    """The reference's steps, computed once for all runs with the same reference."""

    def __init__(self) -> None:
        self._references: list[tuple[Run, list[reference.ReferenceStep], Iterator[reference.ReferenceStep]]] = []

    def steps(self, run: Run) -> Iterator[reference.ReferenceStep]:
        """The reference's steps for a run, from the first step."""
        numbers = run.numbers
        if all(before != numbers for before, _, _ in self._references):
            self._references.append((numbers, [], reference.steps(numbers)))
        steps, rest = next((steps, rest) for before, steps, rest in self._references if before == numbers)
        for index in range(run.steps):
            while len(steps) <= index:
                steps.append(next(rest))
            yield steps[index]


class Follower(threading.Thread):
    """Judges steps from `first` on and passes each to `show`, until the last step or until `stop` is set."""

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
        except BaseException as error:  # raised again by `judged`, in the thread that started the run
            self.error = error

    def _judge(self, reference_step: reference.ReferenceStep) -> bool:
        """Wait for the record of a step and judge it. False if the run has ended without this record."""
        while (step := record.read(self._folder, reference_step.step.index)) is None:
            if self.stop.wait(POLL_S) and record.read(self._folder, reference_step.step.index) is None:
                return False
        self.steps.append(judged(step, reference_step, self._run.dtype))
        self._show(self.steps[-1])
        return True

    def end(self) -> None:
        """Judge the remaining records and wait for the thread. Call it when the run has ended."""
        self.stop.set()
        self.join()

    def leave(self) -> None:
        """Stop without judging the remaining records and without waiting for a compilation."""
        self.stop.set()
        atexit.register(self._leave_at_once)

    def _leave_at_once(self) -> None:
        """End the process and its ranks at once: a normal exit during a compilation would abort with a crash."""
        if self.is_alive():
            os._exit(INTERRUPTED)

    def judged(self) -> list[Judged]:
        """All judged steps. Raises the reference's error if it failed."""
        if self.error is not None:
            raise self.error
        return self.steps
