"""Silences advice on speed, which would interrupt the output of a command: what is verified is drawn, and small.

Torch logs how DTensor gathers over two axes, a pipeline schedule that micro-batches are fewer than stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("torch.distributed.tensor._redistribute", "torch_impl.pipelining.schedule")


@contextmanager
def without_advice() -> Iterator[None]:
    """Silent inside, errors excepted: mesh and micro-batches are drawn, and the ledger shows what is gathered.

    Ranks that are threads enter and leave in any order: each has a filter of its own, and none restores a level.
    """
    errors_only = _Errors()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(errors_only)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(errors_only)


class _Errors(logging.Filter):
    """Lets errors through."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR
