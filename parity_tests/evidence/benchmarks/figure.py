"""A figure: the promise, this run's measurement, and whether the promise was kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`is_met` is None if nothing was promised, or too little was tried. `how` describes the run, with its numbers."""

    name: str
    promised: str
    measured: str
    is_met: bool | None
    how: str

    @property
    def verdict(self) -> str:
        return {True: "kept", False: "MISSED", None: "not judged" if self.is_open else "-"}[self.is_met]

    @property
    def is_open(self) -> bool:
        """Whether something was promised that this run cannot judge."""
        return self.is_met is None and self.promised != "-"


def spread(values: Sequence[float], unit: str = "", digits: int = 3) -> str:
    """The median, with the least and the greatest value."""
    middle, smallest, largest = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}g}{unit} ({smallest:.{digits}g} to {largest:.{digits}g})"
