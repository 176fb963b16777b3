"""How far rounding perturbs a reference: its derivative, with a new rounding error at every step of the arithmetic.

Rounding of inputs alone does not tell how well a result can be computed: rounding leaves a row of zeros as it is, yet
the gradient of its log p is a difference of two equal numbers, which finite arithmetic does not compute exactly. So
each operation of the traced reference adds an error of its own, half a unit in the last place with a random sign (the
first order of Monte Carlo arithmetic, Parker 1997), and the chain rule propagates all of them to the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# Operations that move or choose numbers, and so are exact.
EXACT = frozenset(
    (
        "neg", "abs", "sign", "max", "min", "reduce_max", "reduce_min", "argmax", "argmin", "select_n",
        "clamp", "sort", "rev", "top_k", "cummax", "cummin", "reshape", "broadcast_in_dim", "squeeze",
        "expand_dims", "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad",
        "gather", "scatter", "split", "tile", "copy", "stop_gradient", "convert_element_type", "iota",
        "floor", "ceil", "round", "reduce_precision", "optimization_barrier",
    )
)  # fmt: skip
POOL = 8191  # signs; both numbers are prime, so that no two operations of a reference read the same
STRIDE = 1009
INLINED = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint")


def derivative_with_rounding(
    function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], unit: Any, signs: Any
) -> Any:
    """The tangent of `function(*primals)`, each operation having added `unit` times its result with random signs.

    `primals` and `tangents` are trees of floating arrays; `signs` is a row of POOL numbers that are 1 or -1.
    """
    import jax

    closed, shape = jax.make_jaxpr(function, return_shape=True)(*primals)
    errors = _Errors(unit, signs)
    results = _run(closed.jaxpr, closed.consts, jax.tree.leaves(primals), jax.tree.leaves(tangents), errors)
    leaves = [_zeros(value) if tangent is None else tangent for value, tangent in results]
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


class _Errors:
    """A new array of errors for each operation, whose signs are read from another place in the pool of signs."""

    def __init__(self, unit: Any, signs: Any) -> None:
        self.unit, self.signs, self.count = unit, signs, 0

    def of(self, value: Any) -> Any:
        import jax.numpy as jnp

        self.count += 1
        start = self.count * STRIDE % (self.signs.size // 2)
        signs = self.signs[start:]
        if signs.size < value.size:
            signs = jnp.tile(signs, -(-value.size // signs.size))
        error = self.unit * signs[: value.size].reshape(value.shape) * value
        return jnp.where(jnp.isfinite(value), error, 0.0)


def _run(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], tangents: Sequence[Any], errors: _Errors) -> Any:
    """(value, tangent or None) of each output of a traced function."""
    from jax.extend.core import Literal

    environment: dict[Any, tuple[Any, Any]] = {}

    def read(atom: Any) -> tuple[Any, Any]:
        return (atom.val, None) if isinstance(atom, Literal) else environment[atom]

    environment |= {var: (value, None) for var, value in zip(jaxpr.constvars, consts, strict=True)}
    environment |= {var: pair for var, *pair in zip(jaxpr.invars, values, tangents, strict=True)}
    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in INLINED and "jaxpr" in equation.params:
            inner = equation.params["jaxpr"]
            body, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
            results = _run(body, constants, [v for v, _ in operands], [t for _, t in operands], errors)
        else:
            results = _step(equation, operands, errors)
        environment |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _step(equation: Any, operands: Sequence[tuple[Any, Any]], errors: _Errors) -> list[tuple[Any, Any]]:
    """One operation: its value, and the tangent of it with an error of its own."""
    import jax

    bound = equation.primitive.get_bind_params(equation.params)
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)  # a pair until jax 0.9
    moving = [index for index, (_, tangent) in enumerate(operands) if tangent is not None]

    def operation(*moved: Any) -> Any:
        arguments = [value for value, _ in operands]
        for index, value in zip(moving, moved, strict=True):
            arguments[index] = value
        results = equation.primitive.bind(*functions, *arguments, **parameters)
        return list(results) if equation.primitive.multiple_results else [results]

    values = [operands[index][0] for index in moving]
    if moving:
        results, tangents = jax.jvp(operation, values, [operands[index][1] for index in moving])
    else:
        results = operation()
        tangents = [None] * len(results)
    return [(v, _moved(equation.primitive.name, v, t, errors)) for v, t in zip(results, tangents, strict=True)]


def _moved(name: str, value: Any, tangent: Any, errors: _Errors) -> Any:
    import jax.numpy as jnp

    if not jnp.issubdtype(value.dtype, jnp.floating):
        return None
    if name in EXACT or not value.size:
        return tangent
    error = errors.of(value)
    return error if tangent is None else tangent + error


def _zeros(value: Any) -> Any:
    import jax.numpy as jnp

    return jnp.zeros_like(value)
