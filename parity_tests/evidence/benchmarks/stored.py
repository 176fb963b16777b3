"""docs/benchmarks.json: every figure as it was measured, with its spread, its conditions and its profile.

The page is made from it. A section that was measured apart has the sentence on its own machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from parity_tests.evidence.benchmarks.figure import Figure


@dataclass(frozen=True)
class Section:
    """The figures of one part; `on` is the machine, if it is not that of the whole run."""

    title: str
    figures: tuple[Figure, ...]
    on: str | None = None

    @property
    def nothing_ran(self) -> bool:
        return all(figure.measured.startswith("not run") for figure in self.figures)


@dataclass(frozen=True)
class Run:
    """A run of all sections: the machine, the seconds it took, and the sections in their order."""

    on: str
    seconds: float
    sections: tuple[Section, ...] = ()

    def of(self, title: str) -> Section | None:
        return next((section for section in self.sections if section.title == title), None)


def whole_run(measured: Sequence[Section], on: str, seconds: float, before: Run | None) -> Run:
    """A new run. A section of which nothing ran here stays as it was measured apart before."""
    return Run(on, seconds, tuple(_newer(section, before) for section in measured))


def with_section(run: Run, section: Section) -> Run:
    """The run with another section in its place, or as its last."""
    section = _newer(section, run)
    if run.of(section.title) is None:
        return replace(run, sections=(*run.sections, section))
    return replace(run, sections=tuple(section if old.title == section.title else old for old in run.sections))


def _newer(section: Section, before: Run | None) -> Section:
    old = None if before is None else before.of(section.title)
    return old if old is not None and old.on is not None and section.nothing_ran else section


def read(path: Path) -> Run | None:
    """The run that a file holds, or None if there is no file."""
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    sections = (
        Section(each["title"], tuple(Figure(**figure) for figure in each["figures"]), each["on"])
        for each in record["sections"]
    )
    return Run(record["on"], record["seconds"], tuple(sections))


def write(run: Run, path: Path) -> None:
    path.write_text(json.dumps(asdict(run), indent=1, ensure_ascii=False) + "\n")
