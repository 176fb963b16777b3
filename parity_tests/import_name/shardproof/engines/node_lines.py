"""Keep the line that calls a differentiable collective on its autograd node, so that the backward has this line too.

When autograd calls a backward, the forward's line is not on the stack. The ledger may not have it either, because a
forward may send nothing.
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
    """Inside, each new autograd node of torch and of our collectives keeps the line of its call as `called_at`."""
    original = BackwardCFunction.__init__
    BackwardCFunction.__init__ = _keep_line
    try:
        yield
    finally:
        BackwardCFunction.__init__ = original


def _keep_line(self: Any) -> None:
    if self._forward_cls.__module__.startswith(_OF_COLLECTIVES):
        self.called_at = call_site()
