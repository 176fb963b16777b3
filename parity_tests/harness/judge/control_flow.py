"""NumPy's rules for branches and loops, run as Python runs them. Their results' rounding errors are the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parity_tests.harness.judge.step import DIRECTIONS, NoRule, Step, is_floating

LONG = 10_000  # operations of a scan's turns, all in all: a second of Python, in which XLA compiles one


def cond(equation: Any, moving: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """The branch of the first operand, clamped to those that there are."""
    branches = [nested(branch, moving[1:]) for branch in equation.params["branches"]]
    moves = [any(each) for each in zip(*(branch.moves for branch in branches), strict=True)]

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        branch = branches[min(max(int(values[0]), 0), len(branches) - 1)]
        results, moved = branch(values[1:], tangents[1:])
        return results, _filled(results, moved, moves)

    return step, moves


def while_loop(equation: Any, moving: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """Constants of the condition, those of the body, then what goes round."""
    of_condition, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    first = of_condition + of_body
    moves = _carried(equation.outvars, any(moving))
    condition = nested(equation.params["cond_jaxpr"], (False,) * (of_condition + len(moves)))
    body = nested(equation.params["body_jaxpr"], (*moving[of_condition:first], *moves))

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        carry, moved = list(values[first:]), _filled(values[first:], tangents[first:], moves)
        still = (None,) * (of_condition + len(carry))
        while condition([*values[:of_condition], *carry], still)[0][0]:
            carry, moved = body([*values[of_condition:first], *carry], [*tangents[of_condition:first], *moved])
            moved = _filled(carry, moved, moves)
        return carry, moved

    return step, moves


def scan(equation: Any, moving: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """Constants, what goes round, then what each turn takes one element of."""
    params = equation.params
    if "num_consts" not in params:
        raise NoRule("scan of another form")
    consts, carried, length = params["num_consts"], params["num_carry"], params["length"]
    first = consts + carried
    moves_round = _carried(equation.outvars[:carried], any(moving))
    body = nested(params["jaxpr"], (*moving[:consts], *moves_round, *moving[first:]))
    if length * body.length > LONG:
        raise NoRule("scan of many turns")
    moves = [*moves_round, *body.moves[carried:]]
    turns = range(length - 1, -1, -1) if params["reverse"] else range(length)
    avals = [var.aval for var in equation.outvars[carried:]]

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        carry, moved = list(values[consts:first]), _filled(values[consts:first], tangents[consts:first], moves_round)
        stacked = [np.empty(aval.shape, aval.dtype) for aval in avals]
        stacked_tangents = [
            np.empty((DIRECTIONS, *aval.shape), aval.dtype) if has else None
            for aval, has in zip(avals, moves[carried:], strict=True)
        ]
        for turn in turns:
            results, results_moved = body(
                [*values[:consts], *carry, *(x[turn] for x in values[first:])],
                [*tangents[:consts], *moved, *(None if t is None else t[:, turn] for t in tangents[first:])],
            )
            carry, moved = results[:carried], _filled(results[:carried], results_moved[:carried], moves_round)
            for into, part in zip(stacked, results[carried:], strict=True):
                into[turn] = part
            for into, part in zip(stacked_tangents, results_moved[carried:], strict=True):
                if into is not None:
                    into[:, turn] = part
        return [*carry, *stacked], [*moved, *stacked_tangents]

    return step, moves


def _carried(variables: Sequence[Any], any_moves: bool) -> list[bool]:
    """What goes round moves from its second turn on, even if it starts still."""
    return [any_moves and is_floating(var.aval) for var in variables]


def _filled(values: Sequence[Any], tangents: Sequence[Any], moves: Sequence[bool]) -> list[Any]:
    return [
        np.zeros((DIRECTIONS, *np.shape(value)), value.dtype) if has and tangent is None else tangent
        for value, tangent, has in zip(values, tangents, moves, strict=True)
    ]
