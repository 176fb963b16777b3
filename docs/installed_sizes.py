"""What an installation weighs: the files of this environment, for each extra and all that it requires."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

PROJECT = "shardproof"
EXTRAS = ("", "verify", "verify,hf", "triton", "notebooks", "docs")
# What each brings, in words; its packages and their bounds stand in pyproject.toml.
PURPOSE = {
    "": "`torch_impl`, the production functions, without JAX",
    "verify": "the command, `scheme`, pytest and notebooks' reports",
    "verify,hf": "the same, and models of transformers: what `make verify` installs",
    "triton": "kernels on a GPU, and their interpreter without one",
    "notebooks": "running the notebooks",
    "docs": "building these pages",
}


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
