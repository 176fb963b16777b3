"""Find where a model first departs from its reference: every module's input, output and gradients, in order.

Each name is loaded on first use: ranks in other processes import this package and must not load JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardproof.tracing.comparison import first as first
    from shardproof.tracing.pair import Pair as Pair
    from shardproof.tracing.pair import trace_pair as trace_pair

_MODULE_OF = {"first": "lines", "Pair": "pair", "trace_pair": "pair"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shardproof.tracing' has no attribute {name!r}; it has {', '.join(_MODULE_OF)}")
    return getattr(import_module(f"shardproof.tracing.{_MODULE_OF[name]}"), name)
