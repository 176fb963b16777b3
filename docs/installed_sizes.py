"""What an installation weighs: the files of this environment, for each extra and all that it requires.

`make sizes` writes it into the page on installation, which is read on a repository's site too, where no cell runs.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement

PAGE = Path(__file__).resolve().parent / "how-to" / "install.md"
HEADING = "## Extras and their sizes\n"
PROJECT = "shardproof"
EXTRAS = ("", "verify", "verify,hf", "triton", "notebooks", "docs")
# What each brings, in words; its packages and their bounds stand in pyproject.toml.
PURPOSE = {
    "": "`torch_impl`, the production functions, without JAX",
    "verify": "the command, `scheme`, pytest and notebooks' reports",
    "verify,hf": "the same, and models of transformers: what `make verify` installs",
    "triton": "kernels on a GPU, or in Triton's interpreter without one",
    "notebooks": "running the notebooks",
    "docs": "building these pages",
}

TEXT = """
The size on disk includes all required packages and torch. `make sizes` wrote this table on {date} with Python {python},
torch {torch}, jax {jax}. With torch 2.11.0 for CUDA on Python 3.12, the first three
lines were 4.8, 5.4 and 5.5 GB.

{table}

The largest packages of `'.[verify,hf]'`: {largest}.
"""


def with_section(page: str) -> str:
    """The text of the page with a new section on sizes."""
    before, _, after = page.partition(HEADING)
    rest = after[after.index("\n## ") :]
    versions = {"python": platform.python_version(), "torch": version("torch"), "jax": version("jax")}
    section = TEXT.format(date=date.today().isoformat(), table=table(), largest=largest("verify,hf", 5), **versions)
    return before + HEADING + section + rest


def table() -> str:
    """A Markdown table: each extra, what it is for, how many packages, how large. Names what is not installed here."""
    rows = ["| install | for | packages | size |", "|---|---|---|---|"]
    for extras in EXTRAS:
        names, absent = closure(extras)
        count = f"{len(names)}" + (f", without {', '.join(sorted(absent))}" if absent else "")
        size = sum(map(size_of, names))
        what = f"`'.[{extras}]'`" if extras else "`.`"
        rows.append(f"| {what} | {PURPOSE[extras]} | {count} | {_words(size)} |")
    return "\n".join(rows)


def largest(extras: str, count: int) -> str:
    """The largest packages of an installation, in a sentence."""
    names = sorted(closure(extras)[0], key=size_of, reverse=True)[:count]
    return ", ".join(f"{name} {distribution(name).version} ({_words(size_of(name))})" for name in names)


def closure(extras: str) -> tuple[set[str], set[str]]:
    """The packages that the project with these extras requires, its own aside: installed here, and not."""
    installed: set[str] = set()
    absent: set[str] = set()
    visited: set[tuple[str, str]] = set()
    waiting = [(PROJECT, extra) for extra in ("", *filter(None, extras.split(",")))]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in visited:
            continue
        visited.add((name, extra))
        try:
            requirements = map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:
            absent.add(name)
            continue
        installed.add(name)
        for each in requirements:
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                waiting += [(_normal(each.name), wanted) for wanted in ("", *each.extras)]
    return installed - {PROJECT}, absent


@cache
def size_of(name: str) -> int:
    """Bytes of a package's files on disk."""
    files = (file.locate() for file in distribution(name).files or ())
    return sum(os.path.getsize(file) for file in files if os.path.isfile(file))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _words(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


if __name__ == "__main__":
    lacking = set().union(*(closure(extras)[1] for extras in EXTRAS))
    if lacking:
        names = ", ".join(sorted(lacking))
        sys.exit(f"installed_sizes: {names} not installed; run pip install -e '.[test,notebooks,docs]' before")
    PAGE.write_text(with_section(PAGE.read_text()))
    print(f"{PAGE} written", file=sys.stderr)
