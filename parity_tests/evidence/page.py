"""The common parts of the pages that the programs write: tables, the line on their origin, their sections."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")


def write(text: str, path: Path) -> None:
    """Write a page, make its folder and print where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"written: {path}", flush=True)


def read(path: Path) -> str:
    """A page's text as it was written before, empty if it never was."""
    return path.read_text() if path.is_file() else ""


def written_by(command: str, *packages: str, seed: int | None = None) -> str:
    """The line on a page's origin; torch and JAX are named before further packages."""
    drawn = "" if seed is None else f", seed {seed}"
    return f"Written by `{command}` on {date.today()} with {versions('torch', 'jax', *packages)}{drawn}."


def versions(*packages: str) -> str:
    """`Python 3.11.7, torch 2.13.0`, of installed packages."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)])


def share(part: int, total: int) -> str:
    """`3 of 4 (75.0%)`."""
    return f"{part} of {total} ({part / total:.1%})" if total else "0 of 0"


def bullets(lines: Iterable[str]) -> str:
    """A list of Markdown."""
    return "\n".join(f"- {line}" for line in lines)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows))


def anchor(heading: str) -> str:
    """The anchor of a heading on its page."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def by_component(items: Iterable[Item], component: Callable[[Item], str]) -> list[tuple[str, list[Item]]]:
    """The items of each component, by its name."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(component(item), []).append(item)
    return sorted(groups.items())


def tables(title: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A page of one table for each component, from (component, cells) of each line."""
    groups = by_component(rows, lambda row: row[0])
    parts = ((f"## {name}", markdown_table(columns, [cells for _, cells in group])) for name, group in groups)
    return joined(f"# {title}", *(text for part in parts for text in part))


def joined(*parts: str) -> str:
    """The parts of a page with a blank line between two; empty parts are left out."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def sections(page: str) -> dict[str, str]:
    """The sections of a page by their titles, each with its heading; "" is the text before the first."""
    head, *rest = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    return {"": head} | {section.partition("\n")[0].removeprefix("## "): section for section in rest}


def with_section(page: str, title: str, text: str) -> str:
    """The page with another text under a section's heading; a new section is its last."""
    return joined(*(sections(page) | {title: f"## {title}\n\n{text}"}).values())
