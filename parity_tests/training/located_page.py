"""docs/located.md: which faults a trace of the training step found, and in which module."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from parity_tests.injected_bugs.published import MISTAKES

if TYPE_CHECKING:
    from parity_tests.training.located import Located

HEAD = """# Planted faults, located

`shardproof trace` names the first tensor of a training step that differs from one device's, and the module in which it
was made. Here every fault of the [catalogue](faults.md) that stands in one kind of module is planted in that step, one
after another, and traced in {dtype} on several meshes until something differs. *Found in* is the module that the
trace says to look in; *right* means that the fault stands there.

A fault that lets a rank fail is not located: its own message says what was raised, and where. One whose lines no
traced step calls, or that changes no tensor there, cannot be seen in this model.

Written by `python -m parity_tests.training.located --page docs`{stamp}.

{closing}

## Published mistakes

The classes of TrainVerify's artifact and the readable findings of NVIDIA/Megatron-LM #7452, each with the fault that
stands for it in this model, or the reason why none does.

| source | mistake | fault planted | found in | verdict |
|---|---|---|---|---|
{classes}
"""
COLUMNS = ("fault", "mesh", "first to differ", "found in", "verdict")
SHOWN = ("right", "wrong", "failed")


def closing(outcomes: Sequence[Located]) -> str:
    """The figures, in a sentence."""
    count = Counter(made.word for made in outcomes)
    differing = count["right"] + count["wrong"]
    return (
        f"{len(outcomes)} faults: {differing} change a tensor of the step, and {count['right']} of these are found in "
        f"the right module; {count['failed']} end in a failed rank, {count['equal']} change nothing that is traced, "
        f"{count['not run']} stand in functions that no traced step calls."
    )


def write(outcomes: Sequence[Located], dtype: str, folder: Path) -> Path:
    """Write the page; returns its path."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "flax"))
    stamp = f" on {date.today().isoformat()} with Python {platform.python_version()}, {versions}"
    text = HEAD.format(dtype=dtype, stamp=stamp, closing=closing(outcomes), classes=_classes(outcomes))
    seen = sorted((made for made in outcomes if made.word in SHOWN), key=_component)
    for component, those in groupby(seen, key=_component):
        text += f"\n## {component}\n\n" + _table(list(those))
    path = folder / "located.md"
    path.write_text(text)
    return path


def _classes(outcomes: Sequence[Located]) -> str:
    by_name = {made.fault.name: made for made in outcomes}
    rows = []
    for each in MISTAKES:
        made = by_name.get(each.bug or "")
        there = (each.bug, _home(made), made.word) if made else (each.bug or "-", "-", each.reason or "not tried")
        rows.append(f"| {each.source} | {each.words} | {' | '.join(map(_cell, there))} |")
    return "\n".join(rows)


def _component(made: Located) -> str:
    return made.fault.component


def _table(those: Sequence[Located]) -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for made in those:
        name = f"{made.fault.name} ({made.fault.source})" if made.fault.source else made.fault.name
        rows.append((name, made.mesh, made.said, _home(made), made.word))
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows)


def _home(made: Located) -> str:
    if made.word == "failed":
        return "-"
    return made.found or "the model itself"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("*", "\\*")
