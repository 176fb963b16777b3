"""Python's collector of reference cycles, in processes that run many small cases.

Tracing, sharding and judging a case creates some 100,000 containers, and reference counts free nearly all of them. By
default the collector runs after every 700 new ones, which takes a tenth of the CPU time.
"""

from __future__ import annotations

import gc

THRESHOLDS = 50_000, 10, 10


def collect_rarely() -> None:
    """Raise the thresholds of the collector's three generations, so that it runs rarely."""
    gc.set_threshold(*THRESHOLDS)


def freeze_heap() -> None:
    """Collect now, exempt all existing objects from later collections, and collect rarely afterwards.

    Forks share the memory pages of these objects; a collector that visits them would copy the pages.
    """
    gc.collect()
    gc.freeze()
    collect_rarely()
