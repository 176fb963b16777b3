"""`python -m parity_tests.evidence.benchmarks`, or `make bench`: measure the promised figures, write the page.

A missed promise is printed as missed. With --only the page keeps its other sections; without it, the page keeps only
sections that were measured apart and cannot run here, such as the kernels without a GPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parity_tests.evidence.benchmarks.figure import Figure
from parity_tests.evidence.page import write

SECTIONS = {
    "engines": "Engines",
    "verdict": "A verdict from the shell",
    "survivors": "Ends and stalls",
    "alarms": "False alarms, bytes, compilation",
    "sensitivity": "Sensitivity",
    "injected_bugs": "Injected bugs",
    "peers": "Log-probability beside its peers",
    "filters": "Log-probability among sampled tokens beside full rows",
    "smallest_call": "The smallest call beside plain torch",
    "thd_batch": "A packed batch beside its plain preparation",
    "layouts": "Index arrays of packed batches",
    "attention": "Ring attention beside one process",
    "dispatch": "Dispatch and combine of tokens beside their messages",
    "mamba": "Mamba2 on packed sequences beside a loop",
    "kernels": "Kernels on a GPU",
    "gate": "The gate",
}


def main(
    only: Annotated[str | None, typer.Option(help=f"One section: {', '.join(SECTIONS)}.")] = None,
    alarm_seconds: Annotated[float, typer.Option(help="How long to look for false alarms.")] = 90.0,
    stall_seconds: Annotated[float, typer.Option(help="How long to look for false stalls.")] = 40.0,
    page: Annotated[Path, typer.Option(help="Where the page goes, and beside it the figures as JSON.")] = Path(
        "docs/benchmarks.md"
    ),
    measure: Annotated[bool, typer.Option(help="Without it, make the page from the figures that are there.")] = True,
) -> None:
    """Measure, print and write the page, or one section of it."""
    from parity_tests.evidence.benchmarks import stored
    from parity_tests.evidence.benchmarks.page import machine, text

    if only is not None and only not in SECTIONS:
        raise typer.BadParameter(f"--only {only!r} is not one of {', '.join(SECTIONS)}")
    figures_file = page.with_suffix(".json")
    before = stored.read(figures_file)
    if not measure:
        if before is None:
            raise typer.BadParameter(f"--no-measure needs {figures_file}, which a run writes")
        write(text(before), page)
        return
    console, on, start = Console(soft_wrap=True, highlight=False), machine(), time.perf_counter()
    console.print(on, markup=False)
    seconds, sections = {"alarms": {"seconds": alarm_seconds}, "survivors": {"seconds": stall_seconds}}, []
    for name, title in SECTIONS.items():
        if only in (None, name):
            figures = []
            for figure in _figures(name, **seconds.get(name, {})):
                console.print(f"{figure.verdict:6}  {figure.name}: {figure.measured}", markup=False)
                console.print(f"        promised {figure.promised}; {figure.how}", markup=False, style="dim")
                figures.append(figure)
            sections.append(stored.Section(title, tuple(figures), None if only is None else on))
    if only is None:
        run = stored.whole_run(sections, on, time.perf_counter() - start, before)
    else:
        run = stored.with_section(before or stored.Run(on, 0.0), sections[0])
    stored.write(run, figures_file)
    write(text(run), page)


def _figures(name: str, **seconds: float) -> Iterator[Figure]:
    """The figures of a section, its module imported only now: the engines are timed before JAX has threads."""
    return import_module(f"parity_tests.evidence.benchmarks.{name}").figures(**seconds)


if __name__ == "__main__":
    typer.run(main)
