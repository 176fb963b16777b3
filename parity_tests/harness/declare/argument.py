"""Argument: one tensor of a scheme, by name and spec."""

from __future__ import annotations

from dataclasses import dataclass

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.spec import Spec


@dataclass(frozen=True)
class Argument:
    """One tensor of a scheme: an input by its path (`params.weight`), or an output."""

    name: str
    spec: Spec
    is_integer: bool = False
    nograd: bool = False

    @property
    def differentiable(self) -> bool:
        return not (self.is_integer or self.nograd)

    def shape(self, case: CaseSpec) -> tuple[int, ...]:
        return tuple(dim.size(case.dims) for dim in self.spec.dims)
