"""Verify sharded PyTorch against single-device JAX. The names here are what a user's file imports.

Nothing is loaded before it is asked for: ranks in other processes import this package and must not load JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity_tests.harness.declare.case import CaseSpec as CaseSpec
    from parity_tests.harness.declare.declared import Cost as Cost
    from parity_tests.harness.declare.draws import ids as ids
    from parity_tests.harness.declare.draws import integers as integers
    from parity_tests.harness.declare.draws import lengths as lengths
    from parity_tests.harness.declare.draws import mask as mask
    from parity_tests.harness.declare.draws import offsets as offsets
    from parity_tests.harness.declare.draws import token_below as token_below
    from parity_tests.harness.declare.draws import values as values
    from parity_tests.harness.draw.strategy import every_case as every_case
    from parity_tests.harness.replay import replay as replay
    from parity_tests.harness.scheme import Scheme as Scheme
    from parity_tests.harness.scheme import scheme as scheme
    from parity_tests.harness.verify import check as check

_HOME = {
    "declare.case": ("CaseSpec",),
    "declare.draws": ("ids", "integers", "lengths", "mask", "offsets", "token_below", "values"),
    "replay": ("replay",),
    "declare.declared": ("Cost",),
    "scheme": ("Scheme", "scheme"),
    "draw.strategy": ("every_case",),
    "verify": ("check",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'parity_tests' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"parity_tests.harness.{_MODULE_OF[name]}"), name)
