"""Numbers with a name: the sizes of mesh axes and other counts, their products and inverses.

A factor between what came and what was wanted is told by the name of the number it equals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

MOST_NAMES = 6  # combinations grow as 3 ** names


@dataclass(frozen=True)
class Named:
    """A number and the ways to write it, all equally simple."""

    value: float
    names: tuple[str, ...]

    def __str__(self) -> str:
        return " or ".join(self.names)


def named_numbers(sizes: Mapping[str, float], *, mixed: bool = True) -> list[Named]:
    """Products and inverses of the sizes that are not 1, simplest first; `mixed` ones multiply and divide.

    >>> [(n.value, str(n)) for n in named_numbers({"tp": 4, "cp": 2}, mixed=False)]
    [(4.0, 'tp'), (2.0, 'cp'), (8.0, 'tp*cp'), (0.25, '1/tp'), (0.5, '1/cp'), (0.125, '1/(tp*cp)')]
    """
    usable = [name for name, size in sizes.items() if math.isfinite(size) and size > 0 and size != 1][:MOST_NAMES]
    found: dict[float, tuple[int, list[str]]] = {}
    for exponents in sorted(product((0, 1, -1), repeat=len(usable)), key=_simplicity):
        above = [name for name, e in zip(usable, exponents, strict=True) if e > 0]
        below = [name for name, e in zip(usable, exponents, strict=True) if e < 0]
        if (above and below and not mixed) or not (above or below):
            continue
        value = math.prod(float(sizes[n]) for n in above) / math.prod(float(sizes[n]) for n in below)
        parts = len(above) + len(below)
        if value != 1 and parts == found.setdefault(value, (parts, []))[0]:
            found[value][1].append(_written(above, below))
    return [Named(value, tuple(names)) for value, (_, names) in found.items()]


def shown(value: float) -> str:
    """A number as a message writes it."""
    return f"{value:.4g}"


def sizes_of(axes: Mapping[str, int], factors: Mapping[str, float]) -> dict[str, float]:
    return {**{name: float(size) for name, size in axes.items()}, **factors}


def _simplicity(exponents: Iterable[int]) -> tuple[bool, int, int, list[int]]:
    exponents = list(exponents)
    used = [e for e in exponents if e]
    return (len(set(used)) > 1, sum(e < 0 for e in used) > 0, len(used), [-abs(e) for e in exponents])


def _written(above: list[str], below: list[str]) -> str:
    bottom = "*".join(below)
    if not below:
        return "*".join(above)
    return f"{'*'.join(above) or '1'}/{f'({bottom})' if len(below) > 1 else bottom}"
