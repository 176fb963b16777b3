"""Python's collector of reference cycles, in processes that run many small cases.

To trace, shard and judge a case takes some 100,000 containers, nearly all of which are freed by their count. By default
the collector looks for cycles at every 700 of them, which takes a tenth of the CPU time.
"""

from __future__ import annotations

import gc

THRESHOLDS = 50_000, 10, 10


def collect_rarely() -> None:
    """Look for cycles in new containers, in those that have survived once, and in all, each this rarely."""
    gc.set_threshold(*THRESHOLDS)


def freeze_heap() -> None:
    """Collect now, never look through what is there again, and collect rarely from now on.

    Forks share the pages of what is there, which a collector that looks at them would copy.
    """
    gc.collect()
    gc.freeze()
    collect_rarely()
