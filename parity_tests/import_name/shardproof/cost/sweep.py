"""Meshes and sizes on the command line: `cp=8..64` means meshes with 8, 16, 32 and 64, `s=4096*cp` a size on each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from shardproof.cost.placement import MOST_RANKS
from shardproof.declare.dim_formulas import complete_dims, names_in

NUMBER = r"[0-9]+"
RULE = re.compile(r"(?:[0-9]+|[a-z_]\w*)(?: *(?:\+|-|\*|//) *(?:[0-9]+|[a-z_]\w*))*")


def meshes(words: Sequence[str]) -> list[dict[str, int]]:
    """[{"cp": 8, "tp": 2}, {"cp": 16, "tp": 2}] of ["cp=8..16,tp=2"]. Errors: ValueError that names --mesh."""
    sizes: dict[str, list[int]] = {}
    for text, name, value in _parts(words, "--mesh"):
        match = re.fullmatch(rf"({NUMBER})(?:\.\.({NUMBER}))?", value)
        if not match or int(match[1]) < 1:
            raise ValueError(
                f"--mesh {text!r} is not NAME=NUMBER, such as tp=4, nor NAME=FIRST..LAST, such as cp=8..512"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"--mesh {text!r}: {last} is below {first}; give the smaller number first")
        sizes[name] = [first << step for step in range((last // first).bit_length())]
    axes = [name for name, each in sizes.items() if len(each) > 1]
    if len(axes) > 1:
        raise ValueError(f"--mesh: {' and '.join(axes)} both have a range; give one axis a range")
    count = max((len(each) for each in sizes.values()), default=0)
    by_step = [{name: each[min(step, len(each) - 1)] for name, each in sizes.items()} for step in range(count)]
    for mesh in by_step:
        if math.prod(mesh.values()) > MOST_RANKS:
            named = ",".join(f"{axis}={size}" for axis, size in mesh.items())
            raise ValueError(f"--mesh {named} has {math.prod(mesh.values()):,} ranks; the limit is {MOST_RANKS:,}")
    return by_step


def rules(words: Sequence[str]) -> dict[str, str]:
    """{"s": "4096*cp"} of ["s=4096*cp"]; a number is also a rule. Errors: ValueError that names --dim."""
    by_name: dict[str, str] = {}
    for text, name, value in _parts(words, "--dim"):
        if not RULE.fullmatch(value):
            raise ValueError(
                f"--dim {text!r} is not NAME=NUMBER, such as s=131072, nor a rule of axes, such as s=4096*cp"
            )
        by_name[name] = value
    return by_name


def sizes_on(mesh: Mapping[str, int], dims: Mapping[str, str]) -> dict[str, int]:
    """Each dim on one mesh. Errors: ValueError for a rule that names an unknown axis, and for a negative size."""
    for name, rule in dims.items():
        unknown = [axis for axis in names_in(rule) if axis not in mesh]
        if unknown:
            raise ValueError(f"--dim {name}={rule}: {unknown[0]!r} is not an axis of --mesh ({', '.join(mesh)})")
    try:
        sizes = complete_dims(dims, {}, mesh)
    except ZeroDivisionError:
        raise ValueError(f"--dim {','.join(map('='.join, dims.items()))} divides by 0") from None
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"--dim {name}={dims[name]} is {size}; a size is at least 0")
    return sizes


def _parts(words: Sequence[str], flag: str) -> list[tuple[str, str, str]]:
    """(text, name, value) of each part. Errors: ValueError for a part without a name or with a repeated name."""
    parts = []
    for text in (part for word in words for part in word.split(",")):
        name, _, value = (each.strip() for each in text.partition("="))
        if not name:
            raise ValueError(f"{flag} {text!r} has no name; write NAME=NUMBER")
        if name in [before for _, before, _ in parts]:
            raise ValueError(f"{flag} {text!r} says {name!r} a second time; give each size once")
        parts.append((text, name, value))
    return parts
