"""Silence torch's advice on speed in a command's output: the cases are drawn and small, so it does not apply.

DTensor logs how it gathers over two axes; a pipeline schedule logs that there are fewer micro-batches than stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOGGERS = ("torch.distributed.tensor._redistribute", "torch_impl.pipelining.schedule")


@contextmanager
def without_advice() -> Iterator[None]:
    """Log errors only inside the block.

    Ranks that are threads enter and leave in any order: each adds and removes its own filter, and no level is changed.
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
    """Passes errors only."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR
