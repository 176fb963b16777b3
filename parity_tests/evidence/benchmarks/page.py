"""docs/benchmarks.md: the figures of one run, with the machine and the versions they were measured on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from parity_tests.evidence.benchmarks.figure import Figure

LAST = "The run took"
HEAD = """# Benchmarks

Every promised figure beside what one run measured, kept or missed. Ratios are taken between arms of the same run, in
turn, so that the machine's load meets both; absolute times are this machine's. Written by `make bench`; a section that
was measured apart, by `python -m parity_tests.evidence.benchmarks --only` and its name, says when.

{machine}

"""


def machine() -> str:
    """What the figures were measured on, in one sentence."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "numpy", "hypothesis"))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{date.today().isoformat()}: {_processor()}, {os.cpu_count()} cores, {platform.system()}; "
        f"Python {platform.python_version()}, {versions}. Load average at the start over 1, 5 and 15 minutes: {load}."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def text(sections: Sequence[tuple[str, Sequence[Figure]]], on: str, seconds: float, before: str = "") -> str:
    """The text of the page. A section of which nothing ran here stays as `before`, the page, has it: with its date."""
    measured_apart = {title: text for title, text in _texts(before)[1].items() if "\nMeasured apart, " in text}
    parts = [HEAD.format(machine=on)]
    for title, figures in sections:
        kept = measured_apart.get(f"## {title}") if _nothing_ran(figures) else None
        parts.append(kept or _section(title, figures))
    parts.append(f"{LAST} {seconds:.0f} s.\n")
    return "".join(parts)


def with_section(page: str, title: str, figures: Sequence[Figure], on: str) -> str:
    """The page with another text of one section, or with it as its last, which says that it was measured apart.

    It stays as it is if nothing of the section ran here and it was measured elsewhere.
    """
    head, texts, last = _texts(page)
    if _nothing_ran(figures) and "\nMeasured apart, " in texts.get(f"## {title}", ""):
        return page
    texts[f"## {title}"] = _section(title, figures, f"Measured apart, {on}\n\n")
    (whole_run,) = re.findall(r"^\d{4}-.*$", head, re.MULTILINE)
    return HEAD.format(machine=whole_run) + "".join(texts.values()) + last


def _nothing_ran(figures: Sequence[Figure]) -> bool:
    return all(figure.measured.startswith("not run") for figure in figures)


def _texts(page: str) -> tuple[str, dict[str, str], str]:
    """What stands before the sections of a page, the sections by their titles, and the last line."""
    head, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    *body, last = re.split(rf"^(?={LAST})", "".join(sections), flags=re.MULTILINE)
    texts = (text for text in re.split(r"^(?=## )", "".join(body), flags=re.MULTILINE) if text)
    return head, {text.partition("\n")[0]: text for text in texts}, last


def _section(title: str, figures: Sequence[Figure], on: str = "") -> str:
    rows = "".join(f"| {f.name} | {f.promised} | {f.measured} | {f.verdict} |\n" for f in figures)
    how = "".join(f"- {names}: {how}.\n" for how, names in _named_by_how(figures))
    return f"## {title}\n\n{on}| figure | promised | measured | |\n| --- | --- | --- | --- |\n{rows}\n{how}\n"


def _named_by_how(figures: Sequence[Figure]) -> list[tuple[str, str]]:
    """What was run, each once, and the names of the figures that it gave."""
    names: dict[str, list[str]] = {}
    for figure in figures:
        names.setdefault(figure.how, []).append(figure.name)
    if len(names) == 1:
        return [(how, "each figure") for how in names]
    return [(how, "; ".join(each)) for how, each in names.items()]
