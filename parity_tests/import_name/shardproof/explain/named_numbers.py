"""The names of numbers that a factor or a constant may be: products and quotients of sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

MAX_NAMES = 6  # there are 3 ** names combinations


@dataclass(frozen=True)
class NamedNumber:
    """A number and all equally simple ways to write it."""

    value: float
    names: tuple[str, ...]

    def __str__(self) -> str:
        return " or ".join(self.names)


def named_numbers(sizes: Mapping[str, float], *, mixed: bool = True) -> list[NamedNumber]:
    """Products and inverses of the sizes other than 1, simplest first; `mixed` includes quotients.

    >>> [(n.value, str(n)) for n in named_numbers({"tp": 4, "cp": 2}, mixed=False)]
    [(4.0, 'tp'), (2.0, 'cp'), (8.0, 'tp*cp'), (0.25, '1/tp'), (0.5, '1/cp'), (0.125, '1/(tp*cp)')]
    """
    usable = [name for name, size in sizes.items() if math.isfinite(size) and size > 0 and size != 1][:MAX_NAMES]
    by_value: dict[float, tuple[int, list[str]]] = {}
    for exponents in sorted(product((0, 1, -1), repeat=len(usable)), key=_complexity):
        above = [name for name, e in zip(usable, exponents, strict=True) if e > 0]
        below = [name for name, e in zip(usable, exponents, strict=True) if e < 0]
        if (above and below and not mixed) or not (above or below):
            continue
        value = math.prod(float(sizes[n]) for n in above) / math.prod(float(sizes[n]) for n in below)
        parts = len(above) + len(below)
        if value != 1 and parts == by_value.setdefault(value, (parts, []))[0]:
            by_value[value][1].append(_quotient_text(above, below))
    return [NamedNumber(value, tuple(names)) for value, (_, names) in by_value.items()]


def number_text(value: float) -> str:
    """A number as messages write it."""
    return f"{value:.4g}"


def _complexity(exponents: Iterable[int]) -> tuple[bool, int, int, list[int]]:
    exponents = list(exponents)
    used = [e for e in exponents if e]
    return (len(set(used)) > 1, sum(e < 0 for e in used) > 0, len(used), [-abs(e) for e in exponents])


def _quotient_text(above: list[str], below: list[str]) -> str:
    bottom = "*".join(below)
    if not below:
        return "*".join(above)
    return f"{'*'.join(above) or '1'}/{f'({bottom})' if len(below) > 1 else bottom}"
