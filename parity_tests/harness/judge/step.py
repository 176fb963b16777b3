"""One step of a traced program: values of an operation's results, and their tangents in all directions at once.

A rule is bound to an equation once for a signature: `rule(equation, moving, nested)` reads the equation's parameters
and returns a step and, for each result, whether it has a tangent. The step computes `(results, tangents)` from the
operands' values and tangents; a tangent is None or has a leading axis of DIRECTIONS. `nested(closed_jaxpr, moving)`
makes a program of a function inside the equation. JAX's own rule, for any primitive, is `by_jax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DIRECTIONS = 8
Step = Callable[[Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]
Rule = Callable[[Any, Sequence[bool], Callable[..., Any]], tuple[Step, Sequence[bool]]]


class NoRule(Exception):
    """NumPy has no rule for a primitive, one of its parameters, or a dtype."""


def is_floating(aval: Any) -> bool:
    import jax.numpy as jnp

    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)


def constant(build: Callable[..., Callable[..., Any]]) -> Rule:
    """The rule of an operation that is constant in small changes: `build(equation)` is a function of the operands."""

    def rule(equation: Any, moving: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        function = build(equation)
        if equation.primitive.multiple_results:
            still = (None,) * len(equation.outvars)
            return lambda values, tangents: (function(*values), still), (False,) * len(still)
        return lambda values, tangents: ((function(*values),), (None,)), (False,)

    return rule


def linear(build: Callable[..., Callable[..., Any]]) -> Rule:
    """The rule of an operation that is linear in its floating operands together; integer ones are indices or choices.

    `build(equation, lead)` is a function of operands whose floating ones have these leading dims besides their own.
    """

    def rule(equation: Any, moving: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        several = equation.primitive.multiple_results
        outputs = len(equation.outvars)
        of_values = build(equation, ())
        of_values = of_values if several else _in_a_tuple(of_values)
        if not any(moving):
            still = (None,) * outputs
            return lambda values, tangents: (of_values(*values), still), (False,) * outputs
        of_tangents = build(equation, (DIRECTIONS,))
        of_tangents = of_tangents if several else _in_a_tuple(of_tangents)
        # Of an operand that does not move: zeros, or its value where it is no number to be moved.
        zeros = [
            None if moved or not is_floating(var.aval) else _zeros(var.aval)
            for var, moved in zip(equation.invars, moving, strict=True)
        ]

        def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            operands = [
                tangent if moved else value if zero is None else zero
                for value, tangent, moved, zero in zip(values, tangents, moving, zeros, strict=True)
            ]
            return of_values(*values), of_tangents(*operands)

        return step, (True,) * outputs

    return rule


def elementwise(function: Callable[..., Any], *derivatives: Callable[..., Any]) -> Rule:
    """The rule of `z = function(*operands)`: `derivative(t, z, *operands)` is what a tangent t of that operand adds."""

    def rule(equation: Any, moving: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        if not any(moving):
            return lambda values, tangents: ((function(*values),), (None,)), (False,)
        # A scalar goes with an array of any rank; its tangents then need the dims that its value can lack.
        out = equation.outvars[0].aval
        terms = [
            (index, derivative, None if var.aval.ndim == out.ndim else out.shape)
            for index, (var, derivative) in enumerate(zip(equation.invars, derivatives, strict=True))
            if moving[index]
        ]

        def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            result, moved = function(*values), None
            for index, derivative, shape in terms:
                tangent = tangents[index] if shape is None else _of_scalar(tangents[index], shape)
                term = derivative(tangent, result, *values)
                moved = term if moved is None else moved + term
            return (result,), (moved,)

        return step, (True,)

    return rule


def derived(still: Rule) -> Rule:
    """The rule of an operation whose derivative JAX traces and NumPy evaluates; `still` is its rule if none moves."""

    def rule(equation: Any, moving: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        if not any(moving):
            return still(equation, moving, nested)
        import jax

        step, moves = by_jax(equation, moving, nested)
        operands = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars]
        directions = [
            jax.ShapeDtypeStruct((DIRECTIONS, *var.aval.shape), var.aval.dtype) if moved else None
            for var, moved in zip(equation.invars, moving, strict=True)
        ]
        closed = jax.make_jaxpr(lambda *both: step(*both))(operands, directions)
        program = nested(closed, (False,) * len(closed.jaxpr.invars))

        def traced(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            outputs, _ = program(
                [*values, *(tangent for tangent in tangents if tangent is not None)],
                (None,) * len(closed.jaxpr.invars),
            )
            results, moved = outputs[: len(moves)], iter(outputs[len(moves) :])
            return results, [next(moved) if has else None for has in moves]

        return traced, moves

    return rule


def by_jax(equation: Any, moving: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """JAX's own derivative of a primitive, for JAX's arrays, traced ones too."""
    import jax

    bound = equation.primitive.get_bind_params(equation.params)
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)  # a pair until jax 0.9
    moves = [any(moving) and is_floating(var.aval) for var in equation.outvars]

    def results_of(*operands: Any) -> list[Any]:
        results = equation.primitive.bind(*functions, *operands, **parameters)
        return list(results) if equation.primitive.multiple_results else [results]

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        def of_moving(*moved: Any) -> list[Any]:
            remaining = iter(moved)
            operands = [next(remaining) if has else value for value, has in zip(values, moving, strict=True)]
            return [result for result, has in zip(results_of(*operands), moves, strict=True) if has]

        def along(*direction: Any) -> list[Any]:
            return jax.jvp(of_moving, [v for v, has in zip(values, moving, strict=True) if has], list(direction))[1]

        if not any(moves):
            return results_of(*values), [None] * len(moves)
        moved = iter(jax.vmap(along)(*(tangent for tangent in tangents if tangent is not None)))
        return results_of(*values), [next(moved) if has else None for has in moves]

    return step, moves


def _in_a_tuple(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: (function(*operands),)


def _of_scalar(tangent: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(tangent.reshape(DIRECTIONS, *(1,) * len(shape)), (DIRECTIONS, *shape))


def _zeros(aval: Any) -> np.ndarray:
    return np.broadcast_to(np.zeros((), aval.dtype), (DIRECTIONS, *aval.shape))
