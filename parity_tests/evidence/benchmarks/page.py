"""docs/benchmarks.md: the figures of one run, with the machine and the versions they were measured on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from parity_tests.evidence import page as pages
from parity_tests.evidence.benchmarks.figure import Figure
from parity_tests.evidence.page import bullets, joined, markdown_table, sections, versions

LAST, APART = "The run took", "Measured apart, "
HEAD = """# Benchmarks

Every promised figure beside what one run measured, kept or missed. Ratios are taken between arms of the same run, in
turn, so that the machine's load meets both; absolute times are this machine's. Written by `make bench`; a section that
was measured apart, by `python -m parity_tests.evidence.benchmarks --only` and its name, says when.

{machine}
"""


def machine() -> str:
    """The machine and versions of the measurements, in one sentence."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{date.today()}: {_processor()}, {os.cpu_count()} cores, {platform.system()}; "
        f"{versions('torch', 'jax', 'numpy', 'hypothesis')}. "
        f"Load average at the start over 1, 5 and 15 minutes: {load}."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def text(measured: Sequence[tuple[str, Sequence[Figure]]], on: str, seconds: float, before: str = "") -> str:
    """The text of the page. A section that cannot run here keeps its text and date from `before`, the last page."""
    kept = _measured_apart(before)
    parts = (
        kept[title] if _nothing_ran(figures) and title in kept else f"## {title}\n\n{_figures(figures)}"
        for title, figures in measured
    )
    return joined(HEAD.format(machine=on), *parts, f"{LAST} {seconds:.0f} s.")


def with_section(page: str, title: str, figures: Sequence[Figure], on: str) -> str:
    """The page with another text of one section, or with it as its last, which says that it was measured apart.

    It stays as it is if nothing of the section ran here and it was measured elsewhere.
    """
    if _nothing_ran(figures) and title in _measured_apart(page):
        return page
    body, last, seconds = page.partition(LAST)
    head = sections(body)[""]
    (whole_run,) = re.findall(r"^\d{4}-.*$", head, re.MULTILINE)
    body = joined(HEAD.format(machine=whole_run), body.removeprefix(head))
    return joined(pages.with_section(body, title, f"{APART}{on}\n\n{_figures(figures)}"), last + seconds)


def _measured_apart(page: str) -> dict[str, str]:
    texts = sections(page.partition(LAST)[0])
    return {title: text for title, text in texts.items() if f"\n{APART}" in text}


def _nothing_ran(figures: Sequence[Figure]) -> bool:
    return all(figure.measured.startswith("not run") for figure in figures)


def _figures(figures: Sequence[Figure]) -> str:
    rows = [(each.name, each.promised, each.measured, each.verdict) for each in figures]
    how = bullets(f"{names}: {how}." for how, names in _named_by_how(figures))
    return f"{markdown_table(('figure', 'promised', 'measured', ''), rows)}\n\n{how}"


def _named_by_how(figures: Sequence[Figure]) -> list[tuple[str, str]]:
    """Each description of a run once, with the names of its figures."""
    names: dict[str, list[str]] = {}
    for figure in figures:
        names.setdefault(figure.how, []).append(figure.name)
    if len(names) == 1:
        return [(how, "each figure") for how in names]
    return [(how, "; ".join(each)) for how, each in names.items()]
