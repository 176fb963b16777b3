"""A figure in a table: its value without spreads, and beside it ours and the peer's.

A measured text is a value, then parts with a name each: `0.69 times, by round ...; ours 77 (72 to 88) ms; megatron-core
112 (87 to 121) ms`. The spreads stay in docs/benchmarks.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parity_tests.evidence.benchmarks.figure import Figure

NUMBER = r"\d+(?:\.\d+)?(?:e[+-]\d+)?"
SPREAD = re.compile(rf" ?\({NUMBER} to {NUMBER}\)")
UNITS = "us|ms|s"
LONG = 60  # characters of a value


@dataclass(frozen=True)
class Cells:
    """`ours` and `peer` are times, where both or the first were measured; `parts` are the parts of the value."""

    value: str
    ours: str = ""
    peer: str = ""
    parts: str = ""


def cells_of(figure: Figure) -> Cells:
    """The value, and times beside it."""
    first, *rest = (plain(part) for part in figure.measured.split("; "))
    value, parts = first.partition(", by round")[0], ""
    if len(value) > LONG and ": " in value:
        value, _, parts = value.partition(": ")
    for part in rest:
        if pair := re.fullmatch(rf"(\S+ (?:{UNITS})) (?:beside|over) (\S+ (?:{UNITS}))", part):
            return Cells(value, *pair.groups(), parts)
    times = [part for part in rest if re.fullmatch(rf"(?:.* )?\S*\d (?:{UNITS})", part)]
    ours, peer = [*times, "", ""][:2]
    return Cells(value, re.sub(r"^ours,? ?", "", ours), peer, parts)


def plain(text: str) -> str:
    """Without spreads, and with numbers as people write them: `2,330` for 2.33e+03."""
    return re.sub(NUMBER, lambda found: _number(found.group()), SPREAD.sub("", text))


def _number(text: str) -> str:
    return f"{float(text):,.0f}" if "e+" in text else text
