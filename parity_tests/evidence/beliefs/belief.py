"""Wrong beliefs: ideas of a good engineer that are wrong here, as diffs, each with the condition under which it shows.

A file of `catalogue/` has the form of the catalogue of injected bugs. The header of an entry is
`# the belief [kind] the condition`; `survives:` says, of a belief that drawn cases miss, why they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parity_tests.evidence.injected_bugs.catalogue_file import read
from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug

KINDS = (
    "strides",  # of an argument or a cotangent; what a view of it may be
    "aliasing",  # of a result and an argument, of a gradient and a cotangent
    "cache",  # a key that lacks something, or what is remembered and then changed
    "dtype",  # of a sum, of a result, of what is sent
    "second call",  # with other sizes, in one backward, after an evaluation
    "order",  # of ranks, of repeated heads, of arguments of equal shape
    "count",  # of tokens or ranks, local or over another group
    "padding",  # ids, rows and columns that mean nothing
    "ragged",  # shards that differ in length or are empty
    "border",  # between ranks, chunks, segments, stages
    "sum",  # over ranks, missing or too many; who divides
    "value",  # infinities, NaN, ties, zero
    "frozen",  # parameters without a gradient, shared ones
)


@dataclass(frozen=True)
class Belief(InjectedBug):
    """An injected bug that somebody may believe to be right. `expect` is the condition under which it shows."""

    kinds: ClassVar[tuple[str, ...]] = KINDS

    @property
    def condition(self) -> str:
        """The sizes, values or calls for which the belief is wrong."""
        return self.expect


FOLDER = Path(__file__).parent / "catalogue"
BELIEFS = tuple(belief for path in sorted(FOLDER.glob("*.diff")) for belief in read(path, Belief))
