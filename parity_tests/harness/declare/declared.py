"""Declared: what @scheme was told, checked and complete. All of the harness works on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parity_tests.harness.declare import travel
from parity_tests.harness.declare.argument import Argument
from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.draws import Draw
from parity_tests.harness.run.program import Program


@dataclass(frozen=True)
class Cost:
    """What a scheme promises to send: per phase, op -> (calls, bytes per rank)."""

    forward: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    backward: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Declared:
    """A per-rank function with its reference, its arguments and its menus."""

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    mesh: Mapping[str, tuple[int, ...]]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    output_form: str
    draws: Mapping[str, Draw]
    dims: Mapping[str, tuple[int, ...] | str]
    layouts: Mapping[str, Callable[..., Any]]
    options: Mapping[str, tuple[Any, ...]]
    rank_options: Mapping[str, tuple[Any, ...]]
    dtypes: tuple[str, ...]
    reduction: tuple[str, ...] | None
    roundings: int
    cost: Callable[[CaseSpec], Cost] | None
    engines: tuple[str, ...]
    replicas: str
    random: bool
    file: str
    line: int
    of_module: bool  # declared while its module was executed, not by a function that was called later

    @property
    def key(self) -> str:
        """`module:name`, what a CaseSpec calls it by."""
        return f"{self.fn.__module__}:{self.name}"

    def program(self, **given: Any) -> Program:
        """The half that travels to the ranks."""
        return Program(
            self.name,
            travel.bare(self.fn),
            tuple(self.mesh),
            self.inputs,
            self.outputs,
            self.output_form,
            self.draws,
            self.layouts,
            self.random,
            **given,
        )
