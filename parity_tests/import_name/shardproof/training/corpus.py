"""What a run reads: Python's language reference, byte by byte, packed into streams of unequal documents.

The batch of a step is a function of the run's seed and the step alone. No mesh changes it: each rank builds all of it
and takes its part, and the reference takes the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.random import Generator, Philox

from shardproof.training.run import BLOCK, Run

MOST = 4  # documents of a stream, those of no token included


@dataclass(frozen=True)
class Packed:
    """One stream: ids [t], padding 0; document j stands at `padded[j]:padded[j + 1]`, its real tokens first."""

    ids: np.ndarray
    padded: np.ndarray
    real: np.ndarray


@cache
def topics() -> tuple[np.ndarray, ...]:
    """The bytes of each topic, in the order of their names."""
    from pydoc_data.topics import topics as found

    return tuple(np.frombuffer(found[name].encode(), dtype=np.uint8) for name in sorted(found))


def global_batch(run: Run, step: int) -> list[Packed]:
    """The streams of one step."""
    return [_stream(run.length, Generator(Philox(key=[run.seed, step * run.streams + i]))) for i in range(run.streams)]


def _stream(length: int, rng: Generator) -> Packed:
    """Documents cut at drawn multiples of BLOCK, each shorter than its place by a drawn number of tokens.

    Errors: ValueError for a length that is not a multiple of BLOCK.
    """
    if length % BLOCK or length < BLOCK:
        raise ValueError(f"--length {length} must be a multiple of {BLOCK}")
    borders = np.sort(rng.integers(0, length // BLOCK, size=MOST - 1, endpoint=True)) * BLOCK
    padded = np.concatenate([[0], borders, [length]]).astype(np.int64)
    room = np.diff(padded)
    real = np.where(room > 0, room - rng.integers(0, BLOCK, size=MOST), 0)
    ids = np.zeros(length, dtype=np.int64)
    for start, count in zip(padded, real, strict=False):
        topic = topics()[rng.integers(len(topics()))]
        first = rng.integers(max(len(topic) - count, 0) + 1)
        text = topic[first : first + count]
        ids[start : start + len(text)] = text
    return Packed(ids, padded, np.concatenate([[0], np.cumsum(real)]))
