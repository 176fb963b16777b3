"""All cases of the functions of torch.distributed, by the function's name."""

from __future__ import annotations

from typing import Any

from parity_tests.harness.engines.torch_functions import communication, functionals, layers  # noqa: F401  (they declare cases)
from parity_tests.harness.engines.torch_functions.cases import CASES, plain
from shardproof.declare.case import CaseSpec


def called(name: str, mesh: Any) -> Any:
    """The value of a case on this rank, or how it raised: `raises RuntimeError: ...`."""
    try:
        return plain(CASES[name](mesh))
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"


def all_called(mesh: Any, case: CaseSpec) -> dict[str, Any]:
    """The values of all cases on this rank."""
    return {name: called(name, mesh) for name in CASES}
