"""The training data: bytes of Python's language reference, packed into streams of documents of unequal length.

The batch of a step depends only on the run's seed and the step, not on the mesh: each rank builds the full batch and
takes its part; the reference uses the full batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.random import Generator, Philox

from shardproof.training.run import BLOCK, Run

DOCUMENTS = 4  # documents in a stream, empty documents included


@dataclass(frozen=True)
class Packed:
    """One stream: ids [t], 0 for padding. Document j is at `padded[j]:padded[j + 1]`, with its real tokens first."""

    ids: np.ndarray
    padded: np.ndarray
    real: np.ndarray


@cache
def topics() -> tuple[np.ndarray, ...]:
    """The bytes of each topic of the reference, sorted by name."""
    from pydoc_data.topics import topics as found

    return tuple(np.frombuffer(found[name].encode(), dtype=np.uint8) for name in sorted(found))


def global_batch(run: Run, step: int) -> list[Packed]:
    """The streams of one step."""
    return [_stream(run.length, Generator(Philox(key=[run.seed, step * run.streams + i]))) for i in range(run.streams)]


def _stream(length: int, rng: Generator) -> Packed:
    """A stream of documents. Slots end at drawn multiples of BLOCK; each document leaves a drawn number of tokens free.

    Errors: ValueError for a length that is not a multiple of BLOCK.
    """
    if length % BLOCK or length < BLOCK:
        raise ValueError(f"--length {length} must be a multiple of {BLOCK}")
    borders = np.sort(rng.integers(0, length // BLOCK, size=DOCUMENTS - 1, endpoint=True)) * BLOCK
    padded = np.concatenate([[0], borders, [length]]).astype(np.int64)
    room = np.diff(padded)
    real = np.where(room > 0, room - rng.integers(0, BLOCK, size=DOCUMENTS), 0)
    ids = np.zeros(length, dtype=np.int64)
    for start, count in zip(padded, real, strict=False):
        topic = topics()[rng.integers(len(topics()))]
        first = rng.integers(max(len(topic) - count, 0) + 1)
        text = topic[first : first + count]
        ids[start : start + len(text)] = text
    return Packed(ids, padded, np.concatenate([[0], np.cumsum(real)]))
