"""Find the differences that do not leave a module: inside it a tensor may hold other tokens than on one device.

Experts over ranks run on the tokens that are sent to them, in another order and number. Such a tensor has no place in
the reference, and is no error if the module's output and gradients are equal. If they differ, they are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardproof.tracing.comparison import ANOTHER_SHAPE, Line
from shardproof.tracing.events import IN, OUT


def inner_differences(compared: Sequence[Line]) -> list[Line]:
    """The wrong tensors inside modules, if they have no place in the reference or the difference stays inside.

    A difference leaves by the outer module's output, the gradient of its input, or the gradient of one of its weights.
    """
    return [line for line in compared if not line.ok and line.event is not None and _stays_inside(line, compared)]


def _stays_inside(line: Line, compared: Sequence[Line]) -> bool:
    """Whether a line's difference stays inside the modules around it; False if none of these was compared."""
    for outer in _outer_modules(line):
        leaving = _leaving(outer, line.phase, compared)
        if not leaving:
            continue
        if ANOTHER_SHAPE in line.notes:
            return True
        weights = [each for each in compared if each.phase == "weight" and _is_inside(each.home, outer)]
        if line.phase != "forward" and not all(each.ok for each in weights):
            return False
        return all(each.ok or _stays_inside(each, compared) for each in leaving)
    return False


def _outer_modules(line: Line) -> Iterator[str]:
    """The modules that contain an event's module, the nearest first."""
    outer = "" if line.event is None else line.event.module
    while outer:
        outer = outer.rpartition(".")[0]
        yield outer


def _leaving(outer: str, phase: str, compared: Sequence[Line]) -> list[Line]:
    """The lines of a module's output or, backward, of the gradient of its input; one for each call."""
    end = OUT if phase == "forward" else IN
    of_phase = (line for line in compared if line.phase == phase and line.event is not None)
    return [line for line in of_phase if line.event and (line.event.module, line.event.end) == (outer, end)]


def _is_inside(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(f"{outer}.")
