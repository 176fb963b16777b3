"""Rules that evaluate branches and loops with NumPy. The caller adds the rounding errors of their results.

Names are JAX's: every iteration of a loop reads `consts` and passes a `carry` to the next; each iteration of a scan
also reads one element from each of `xs` and writes one to each of `ys`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardproof.judge.step import DIRECTIONS, NoRule, Step, is_floating

MAX_SCAN_OPERATIONS = 10_000  # over all iterations; they take 1 s in Python, as long as XLA takes to compile a scan


def cond(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """Run the branch that the first operand selects, clamped to the existing branches."""
    branches = [nested(branch, has_tangent[1:]) for branch in equation.params["branches"]]
    result_has_tangent = [any(each) for each in zip(*(branch.output_has_tangent for branch in branches), strict=True)]

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        branch = branches[min(max(int(values[0]), 0), len(branches) - 1)]
        results, result_tangents = branch(values[1:], tangents[1:])
        return results, _with_zeros(results, result_tangents, result_has_tangent)

    return step, result_has_tangent


def while_loop(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """Operands: the condition's consts, the body's consts, then the carry."""
    cond_nconsts, body_nconsts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    nconsts = cond_nconsts + body_nconsts
    carry_has_tangent = _carry_has_tangent(equation.outvars, any(has_tangent))
    condition = nested(equation.params["cond_jaxpr"], (False,) * (cond_nconsts + len(carry_has_tangent)))
    body = nested(equation.params["body_jaxpr"], (*has_tangent[cond_nconsts:nconsts], *carry_has_tangent))

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        cond_consts, body_consts, carry = values[:cond_nconsts], values[cond_nconsts:nconsts], list(values[nconsts:])
        body_consts_tangents = tangents[cond_nconsts:nconsts]
        carry_tangents = _with_zeros(carry, tangents[nconsts:], carry_has_tangent)
        no_tangents = (None,) * (cond_nconsts + len(carry))
        while condition([*cond_consts, *carry], no_tangents)[0][0]:
            carry, carry_tangents = body([*body_consts, *carry], [*body_consts_tangents, *carry_tangents])
            carry_tangents = _with_zeros(carry, carry_tangents, carry_has_tangent)
        return carry, carry_tangents

    return step, carry_has_tangent


def scan(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """Operands: consts, carry, xs. Results: carry, ys."""
    params = equation.params
    num_consts, num_carry = _consts_and_carry(params)
    length = params["length"]
    first_x = num_consts + num_carry
    carry_has_tangent = _carry_has_tangent(equation.outvars[:num_carry], any(has_tangent))
    body = nested(params["jaxpr"], (*has_tangent[:num_consts], *carry_has_tangent, *has_tangent[first_x:]))
    if length * body.length > MAX_SCAN_OPERATIONS:
        raise NoRule("scan of many iterations")
    y_has_tangent = body.output_has_tangent[num_carry:]
    iterations = range(length - 1, -1, -1) if params["reverse"] else range(length)
    y_avals = [var.aval for var in equation.outvars[num_carry:]]

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        consts, carry, xs = values[:num_consts], list(values[num_consts:first_x]), values[first_x:]
        consts_tangents, xs_tangents = tangents[:num_consts], tangents[first_x:]
        carry_tangents = _with_zeros(carry, tangents[num_consts:first_x], carry_has_tangent)
        ys = [np.empty(aval.shape, aval.dtype) for aval in y_avals]
        ys_tangents = [
            np.empty((DIRECTIONS, *aval.shape), aval.dtype) if has else None
            for aval, has in zip(y_avals, y_has_tangent, strict=True)
        ]
        for i in iterations:
            results, result_tangents = body(
                [*consts, *carry, *(x[i] for x in xs)],
                [*consts_tangents, *carry_tangents, *(None if t is None else t[:, i] for t in xs_tangents)],
            )
            carry = results[:num_carry]
            carry_tangents = _with_zeros(carry, result_tangents[:num_carry], carry_has_tangent)
            for y, y_i in zip(ys, results[num_carry:], strict=True):
                y[i] = y_i
            for y_tangent, y_i_tangent in zip(ys_tangents, result_tangents[num_carry:], strict=True):
                if y_tangent is not None:
                    y_tangent[:, i] = y_i_tangent
        return [*carry, *ys], [*carry_tangents, *ys_tangents]

    return step, [*carry_has_tangent, *y_has_tangent]


def _consts_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are consts, and how many are the carry. Errors: NoRule, if JAX says it otherwise."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    if "ft_in" not in params:
        raise NoRule("scan of another form")
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.12 has a tree of all operands
    return len(list(consts)), len(list(carry))


def _carry_has_tangent(variables: Sequence[Any], any_operand_has: bool) -> list[bool]:
    """Whether each carry has a tangent. Any floating carry may get a tangent in the first iteration."""
    return [any_operand_has and is_floating(var.aval) for var in variables]


def _with_zeros(values: Sequence[Any], tangents: Sequence[Any], has_tangent: Sequence[bool]) -> list[Any]:
    """The tangents, with zeros for a needed tangent that is None."""
    return [
        np.zeros((DIRECTIONS, *np.shape(value)), value.dtype) if has and tangent is None else tangent
        for value, tangent, has in zip(values, tangents, has_tangent, strict=True)
    ]
