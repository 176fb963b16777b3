"""torch's advice on how DTensor gathers over two axes, which would stand between what a command says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SAID_BY = "torch.distributed.tensor._redistribute"


@contextmanager
def without_advice() -> Iterator[None]:
    """Unsaid for as long as this lasts: the mesh is what is asked for, and the ledger judges what is gathered."""
    said = logging.getLogger(SAID_BY)
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        yield
    finally:
        said.setLevel(level)
