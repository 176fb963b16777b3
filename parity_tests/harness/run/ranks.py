"""What every engine shares: their names, their limits, and what a run brings back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads torch, and the names are asked for by who completes a word
    from parity_tests.harness.run.ledger import Ledger

ENGINES = ("lockstep", "gloo", "nccl", "torchrun")
LARGEST_WORLD = 64
LOCKSTEP_QUIET_S, PROCESS_QUIET_S = 30.0, 10.0


@dataclass(frozen=True)
class Ranks:
    """What each rank returned, every collective it issued, and the seconds between start and last result."""

    results: tuple[Any, ...]
    ledger: Ledger
    seconds: float
