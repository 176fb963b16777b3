"""Python's collector of reference cycles, in processes that run many small cases.

Tracing, sharding and judging a case creates some 100,000 containers, and reference counts free nearly all of them. By
default the collector runs after every 700 new ones, which takes a tenth of the CPU time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = 50_000, 10, 10


def collect_rarely() -> None:
    """Raise the thresholds of the collector's three generations, so that it runs rarely."""
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside a block, raise the thresholds that are lower; afterwards they are as before."""
    before = gc.get_threshold()
    # A threshold of 0 turns the collector off, which the caller may have done.
    gc.set_threshold(*(max(pair) if pair[0] else 0 for pair in zip(before, THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def freeze_heap() -> None:
    """Collect now, exempt all existing objects from later collections, and collect rarely afterwards.

    Forks share the memory pages of these objects; a collector that visits them would copy the pages.
    """
    gc.collect()
    gc.freeze()
    collect_rarely()
