"""Sum an input that each rank has a term of, before a function is called: what the function may have forgotten.

A gradient of type P whose all_reduce is missing goes through a norm or another function that is not linear. Then no sum
of the ranks' outputs is the reference's, and no operation after it mends the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw.inputs import addend_axes
from shardproof.engines.program import Program

Wrapper = Callable[[Program], Program]


def sums_of_inputs(scheme: Declared, case: CaseSpec) -> Iterator[tuple[str, Wrapper, Wrapper]]:
    """For each input and each axis of several ranks that have terms of it, the words and the wrapper of the sum.

    The second wrapper multiplies the terms by the number of ranks. If that makes the function right too, it has the sum
    and divides it.
    """
    for arg in scheme.inputs:
        for axis in addend_axes(arg, "input"):
            if case.mesh[axis] > 1 and not arg.modified:
                with_input = partial(_with_input, arg.name)
                yield (
                    f"{arg.name} is summed over {axis}",
                    with_input(lambda x, mesh, axis=axis: _Sum.apply(x, mesh[axis])),
                    with_input(lambda x, mesh, axis=axis: x * mesh.size(axis)),
                )


def _with_input(name: str, change: Callable[[Tensor, Any], Any]) -> Wrapper:
    def wrap(program: Program) -> Program:
        def fn(mesh: Any, **arguments: Any) -> Any:
            return program.fn(mesh, **{**arguments, name: change(arguments[name], mesh)})

        return replace(program, fn=fn)

    return wrap


class _Sum(torch.autograd.Function):
    """The sum over a group as a value of type I, whose cotangent is that of each term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0], None
