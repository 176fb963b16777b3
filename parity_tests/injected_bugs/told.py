"""What a killing run says while it works: a line that is overwritten on a terminal, one now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

EVERY_S = 10.0  # between two lines that stay
NOISY = "torch_impl.pipelining.schedule"  # warns of few micro-batches, which many drawn cases have


class Told:
    """Says how far something has come, on standard error."""

    def __init__(self, console: Console, every_s: float = EVERY_S) -> None:
        self.console, self.every_s = console, every_s
        self.last = -every_s

    def __call__(self, doing: str, done: int, total: int, name: str) -> None:
        """The first and the last are always said."""
        line, now = f"{doing} {done}/{total} {name}", time.monotonic()
        if self.console.is_terminal:
            self.console.print(line.ljust(self.console.width - 1)[: self.console.width - 1], end="\r", highlight=False)
        elif done in (1, total) or now - self.last >= self.every_s:
            self.last = now
            self.console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def without_warnings_of_schedules() -> Iterator[None]:
    """The schedules are drawn, not chosen by whoever reads along."""
    logger = logging.getLogger(NOISY)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
