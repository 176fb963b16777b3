"""Find tensors of a narrower dtype than the inputs: an error of rounding to that dtype needs one."""

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


class _Narrow(TorchDispatchMode):
    """Sees the floating tensors that operations return, in the forward and in backwards that are run inside it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, set[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        dtypes = {x.dtype for x in tensors if x.is_floating_point() and x.dtype.itemsize < self.size}
        self.found |= {str(dtype).removeprefix("torch.") for dtype in dtypes}
        return result


def narrow_dtypes(scheme: Declared, case: CaseSpec) -> set[str] | None:
    """Run the case once, and return the dtypes of forward tensors that are narrower than the case's dtype.

    None if a rank fails.
    """
    size = getattr(torch, case.dtype).itemsize
    found: list[set[str]] = []

    def wrap(program: Program) -> Callable[..., Any]:
        def fn(mesh: Any, **arguments: Any) -> Any:
            with _Narrow(size) as mode:
                returned = program.fn(mesh, **arguments)
            found.append(mode.found)
            return returned

        return replace(program, fn=fn)

    report = verify_case(scheme, case, wrap_program=wrap)
    return None if report.failure is not None else set().union(*found)
