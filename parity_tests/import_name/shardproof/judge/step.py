"""One step of a traced program: an operation's values, and their tangents in all directions at once.

A rule is bound to an equation once per signature: `rule(equation, has_tangent, nested)` reads the equation's parameters
and which operands have a tangent; it returns a step and, for each result, whether it has a tangent. The step computes
`(results, tangents)` from the operands' values and tangents; a tangent is None or has a leading axis of DIRECTIONS.
`nested(closed_jaxpr, has_tangent)` builds the program of a function inside the equation. `by_jax` is JAX's own rule,
for any primitive.
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
    """The rule of a piecewise constant operation; `build(equation)` is its function."""

    def rule(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        function = build(equation)
        if equation.primitive.multiple_results:
            no_tangents = (None,) * len(equation.outvars)
            return lambda values, tangents: (function(*values), no_tangents), (False,) * len(no_tangents)
        return lambda values, tangents: ((function(*values),), (None,)), (False,)

    return rule


def linear(build: Callable[..., Callable[..., Any]]) -> Rule:
    """The rule of an operation that is jointly linear in its floating operands; integers are indices or choices.

    `build(equation, lead)` is a function of operands; the floating ones have the leading dims `lead`.
    """

    def rule(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        several = equation.primitive.multiple_results
        outputs = len(equation.outvars)
        of_values = build(equation, ())
        of_values = of_values if several else _in_a_tuple(of_values)
        if not any(has_tangent):
            no_tangents = (None,) * outputs
            return lambda values, tangents: (of_values(*values), no_tangents), (False,) * outputs
        of_tangents = build(equation, (DIRECTIONS,))
        of_tangents = of_tangents if several else _in_a_tuple(of_tangents)
        # For an operand without a tangent: zeros, or its value if it is an index or a choice.
        zeros = [
            None if has or not is_floating(var.aval) else _zeros(var.aval)
            for var, has in zip(equation.invars, has_tangent, strict=True)
        ]

        def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            operands = [
                tangent if has else value if zero is None else zero
                for value, tangent, has, zero in zip(values, tangents, has_tangent, zeros, strict=True)
            ]
            return of_values(*values), of_tangents(*operands)

        return step, (True,) * outputs

    return rule


def elementwise(function: Callable[..., Any], *derivatives: Callable[..., Any]) -> Rule:
    """The rule of `z = function(*operands)`.

    `derivative(t, z, *operands)` is the contribution of that operand's tangent t.
    """

    def rule(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        if not any(has_tangent):
            return lambda values, tangents: ((function(*values),), (None,)), (False,)
        # A scalar broadcasts with an array of any rank; its tangents then need dims that its value may lack.
        out = equation.outvars[0].aval
        terms = [
            (index, derivative, None if var.aval.ndim == out.ndim else out.shape)
            for index, (var, derivative) in enumerate(zip(equation.invars, derivatives, strict=True))
            if has_tangent[index]
        ]

        def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            result, result_tangent = function(*values), None
            for index, derivative, shape in terms:
                tangent = tangents[index] if shape is None else _of_scalar(tangents[index], shape)
                term = derivative(tangent, result, *values)
                result_tangent = term if result_tangent is None else result_tangent + term
            return (result,), (result_tangent,)

        return step, (True,)

    return rule


def derived(without_tangents: Rule) -> Rule:
    """The rule of an operation: JAX traces its derivative and NumPy evaluates it; without tangents, another rule."""

    def rule(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        if not any(has_tangent):
            return without_tangents(equation, has_tangent, nested)
        import jax

        step, result_has_tangent = by_jax(equation, has_tangent, nested)
        operands = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars]
        directions = [
            jax.ShapeDtypeStruct((DIRECTIONS, *var.aval.shape), var.aval.dtype) if has else None
            for var, has in zip(equation.invars, has_tangent, strict=True)
        ]
        closed = jax.make_jaxpr(lambda *both: step(*both))(operands, directions)
        program = nested(closed, (False,) * len(closed.jaxpr.invars))

        def traced(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            outputs, _ = program(
                [*values, *(tangent for tangent in tangents if tangent is not None)],
                (None,) * len(closed.jaxpr.invars),
            )
            results, result_tangents = outputs[: len(result_has_tangent)], iter(outputs[len(result_has_tangent) :])
            return results, [next(result_tangents) if has else None for has in result_has_tangent]

        return traced, result_has_tangent

    return rule


def by_jax(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """JAX's own derivative of a primitive, for JAX arrays, including traced ones."""
    import jax

    bound = equation.primitive.get_bind_params(equation.params)
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)  # before jax 0.9 it was a pair
    result_has_tangent = [any(has_tangent) and is_floating(var.aval) for var in equation.outvars]

    def results_of(*operands: Any) -> list[Any]:
        results = equation.primitive.bind(*functions, *operands, **parameters)
        return list(results) if equation.primitive.multiple_results else [results]

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        def of_differentiated(*differentiated: Any) -> list[Any]:
            remaining = iter(differentiated)
            operands = [next(remaining) if has else value for value, has in zip(values, has_tangent, strict=True)]
            return [result for result, has in zip(results_of(*operands), result_has_tangent, strict=True) if has]

        primals = [value for value, has in zip(values, has_tangent, strict=True) if has]

        def along(*direction: Any) -> list[Any]:
            return jax.jvp(of_differentiated, primals, list(direction))[1]

        if not any(result_has_tangent):
            return results_of(*values), [None] * len(result_has_tangent)
        result_tangents = iter(jax.vmap(along)(*(tangent for tangent in tangents if tangent is not None)))
        return results_of(*values), [next(result_tangents) if has else None for has in result_has_tangent]

    return step, result_has_tangent


def _in_a_tuple(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: (function(*operands),)


def _of_scalar(tangent: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(tangent.reshape(DIRECTIONS, *(1,) * len(shape)), (DIRECTIONS, *shape))


def _zeros(aval: Any) -> np.ndarray:
    return np.broadcast_to(np.zeros((), aval.dtype), (DIRECTIONS, *aval.shape))
