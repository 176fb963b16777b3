"""Whether a function makes tensors of a narrower dtype than its inputs: only then can that dtype explain an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.engines.program import Program
from shardproof.verify_one_case import verify_case


class _Narrowest(TorchDispatchMode):
    """Sees the floating tensors that operations return, in the forward and in backwards that are run inside it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.found = self.found or any(x.is_floating_point() and x.dtype.itemsize < self.size for x in tensors)
        return result


def has_narrow_tensors(scheme: Declared, case: CaseSpec) -> bool:
    """Run the case once; whether an operation of a rank's forward returned a narrower tensor than the case's dtype."""
    size = getattr(torch, case.dtype).itemsize
    found: list[bool] = []

    def wrap(program: Program) -> Callable[..., Any]:
        def fn(mesh: Any, **arguments: Any) -> Any:
            with _Narrowest(size) as mode:
                returned = program.fn(mesh, **arguments)
            found.append(mode.found)
            return returned

        return replace(program, fn=fn)

    report = verify_case(scheme, case, wrap_program=wrap)
    return report.failure is not None or any(found)
