"""Silences torch's advice on how DTensor gathers over two axes, which would interrupt the output of a command."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SAID_BY = "torch.distributed.tensor._redistribute"


@contextmanager
def without_advice() -> Iterator[None]:
    """Silent inside: the mesh is given by what is verified, and the ledger shows what is gathered.

    Ranks that are threads enter and leave in any order: each has a filter of its own, and none restores a level.
    """
    logger, errors_only = logging.getLogger(SAID_BY), _Errors()
    logger.addFilter(errors_only)
    try:
        yield
    finally:
        logger.removeFilter(errors_only)


class _Errors(logging.Filter):
    """Lets errors through."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR
