"""The lines that call differentiable collectives, kept by their autograd nodes for the backward.

Autograd calls a backward without the line of its forward on the stack, and a forward may send nothing that the ledger
would see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.function import BackwardCFunction

from shardproof.engines.ledger import call_site

_OF_COLLECTIVES = ("torch.", "torch_impl.collectives")


@contextmanager
def kept() -> Iterator[None]:
    """Let each new node of torch and of the collectives keep its line as `called_at`."""
    original = BackwardCFunction.__init__
    BackwardCFunction.__init__ = _keep_line
    try:
        yield
    finally:
        BackwardCFunction.__init__ = original


def _keep_line(self: Any) -> None:
    if self._forward_cls.__module__.startswith(_OF_COLLECTIVES):
        self.called_at = call_site()
