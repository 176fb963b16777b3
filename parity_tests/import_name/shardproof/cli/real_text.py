"""A case from real text: its bytes, and a bigram model that counts the pairs of bytes in the same text.

The text is the language reference that every CPython contains. Row i of the logits holds the log counts of each byte
after byte i of the passage: peaked rows with ties, and -inf for pairs that never occur. The targets are the actual next
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw.drawing import one_case
from shardproof.draw.inputs import rounded
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

BYTES = 256
ROWS, LENGTH = 4, 64  # number of passages, and bytes of each
DIGITS = 12  # printed digits of a perplexity: a few less than agree in float64


@cache
def text() -> np.ndarray:
    """The bytes of the language reference, with its topics in order of name."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)


@cache
def passages() -> tuple[np.ndarray, np.ndarray]:
    """(logits [b s v] in float64, target [b s]) of passages spread evenly over the text."""
    read = text()
    counts = np.zeros((BYTES, BYTES))
    np.add.at(counts, (read[:-1], read[1:]), 1.0)
    with np.errstate(divide="ignore"):
        scores = np.log(counts)
    starts = np.linspace(0, len(read) - LENGTH - 1, ROWS).astype(np.int64)
    at = starts[:, None] + np.arange(LENGTH)
    return scores[read[at]], read[at + 1].astype(np.int64)


@dataclass(frozen=True)
class Reading:
    """One verification on the text: the full report, and each side's perplexity."""

    report: Report
    perplexity: str
    reference: str

    @property
    def ok(self) -> bool:
        return self.report.ok and self.perplexity == self.reference


def read_with(scheme: Declared, tp: int, dtype: str, engine: str = "lockstep") -> Reading:
    """Verify a scheme of `logits` "b s v/tp" and `target` "b s" whose output is the log-probability, on the text."""
    case = reading_case(scheme, tp, dtype, engine)
    logits, target = passages()
    report = verify_case(scheme, case, arrays={"logits": rounded(logits, dtype), "target": target})
    row = report.worst("output")
    if row is None:
        return Reading(report, "-", "-")
    return Reading(report, perplexity(row.got), perplexity(row.want))


def reading_case(scheme: Declared, tp: int, dtype: str, engine: str = "lockstep") -> CaseSpec:
    return one_case(scheme, tp=tp, b=ROWS, s=LENGTH, v=BYTES, temperature=1.0, dtype=dtype, engine=engine)


def perplexity(logprob: np.ndarray) -> str:
    """exp(-mean log p), to DIGITS digits."""
    return f"{float(np.exp(-logprob.mean())):.{DIGITS}g}"
