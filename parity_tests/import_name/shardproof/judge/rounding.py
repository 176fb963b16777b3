"""How far rounding perturbs a reference: its derivative, with a new rounding error in every operation.

Rounding only the inputs does not tell how precisely a result can be computed: it leaves a row of zeros unchanged, yet
the gradient of its log p is a difference of two equal numbers, which finite arithmetic does not compute exactly. So
each operation of the traced reference adds its own error, half a unit in the last place with a random sign (the first
order of Monte Carlo arithmetic, Parker 1997), and the chain rule propagates all errors to the results, in DIRECTIONS
random directions at once. A loop or a branch is one operation: its body's derivative is exact, and its result gets one
error. A sum over repeated indices, such as the gradient of an embedding, also rounds after each of its terms (see
repeated_indices.py).

The same program runs on NumPy arrays, with the rules of `primitives`, or inside `jax.jit` on JAX arrays, with JAX's own
rule for every primitive; `evaluator` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardproof.judge.primitives import numpy_rule
from shardproof.judge.repeated_indices import additions_of, adds_by_index
from shardproof.judge.step import NoRule, Rule, by_jax, is_floating
from shardproof.judge.storage import Storage, check_storage, is_stored

# Operations that permute or select numbers and are therefore exact.
EXACT = frozenset(
    (
        "neg", "abs", "sign", "max", "min", "reduce_max", "reduce_min", "argmax", "argmin", "select_n",
        "clamp", "sort", "rev", "top_k", "cummax", "cummin", "reshape", "broadcast_in_dim", "squeeze",
        "expand_dims", "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad",
        "gather", "scatter", "split", "tile", "copy", "stop_gradient", "convert_element_type", "iota",
        "floor", "ceil", "round", "reduce_precision", "optimization_barrier",
    )
)  # fmt: skip
# Operations that libraries compute differently: in gelu torch has 1 + erf(x) where JAX has erfc(-x), which is exact to
# its own last place far below 1. Their error is as large as for a number of at least 1.
AS_LARGE_AS_ONE = frozenset(("erfc",))
# Signs. Operation i starts to read at i * STRIDE modulo POOL // 2; the two are coprime, so no two of that many
# operations start at the same sign.
POOL = 8191
STRIDE = 1009
# Mean number of elements in an operation's result above which the program is compiled. Seconds of CPU time of NumPy and
# of XLA's first call: log p of [8, 256] 0.002 and 0.28, of [64, 4096] (10**5 elements) 0.38 and 0.35, of [64, 32768]
# 3.2 and 1.3; attention over 128 tokens (65,000) 0.09 and 0.60, over 512 tokens (10**6) 5.0 and 4.0.
LARGE = 100_000
# Functions inside functions, by the parameter that contains their operations.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


@dataclass
class Operation:
    """An equation of the trace; its operands and results are indices among all values of the program."""

    equation: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    numbers: tuple[int, ...]  # the index of each result's rounding error; 0 if the result is exact
    last_used: tuple[int, ...] = ()
    step: Any = None  # Step, once it is bound
    additions: Callable[..., Any] | None = None  # of a sum over repeated indices


class Trace:
    """A traced function as one flat list of operations, with nested functions inlined."""

    def __init__(self, closed: Any, rounded: bool = True) -> None:
        self.constants: list[Any] = []
        self.floating: list[bool] = []
        self.operations: list[Operation] = []
        self._rounded, self._count = rounded, 0
        self.inputs = [self._index(var.aval) for var in closed.jaxpr.invars]
        self.outputs = self._inline(closed.jaxpr, closed.consts, self.inputs)
        self._drop_unused_operations()
        self.elements = sum(var.aval.size for operation in self.operations for var in operation.equation.outvars)

    def _index(self, aval: Any, constant: Any = None) -> int:
        self.constants.append(constant)
        self.floating.append(is_floating(aval))
        return len(self.constants) - 1

    def _inline(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        from jax.extend.core import Literal

        index = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, constant in zip(jaxpr.constvars, consts, strict=True):
            index[var] = self._index(var.aval, np.asarray(constant))

        def read(atom: Any) -> int:
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                return self._index(aval, np.asarray(atom.val, dtype=aval.dtype))
            return index[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            inner = equation.params.get(INLINED.get(equation.primitive.name, ""))
            if inner is not None:
                body, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
                results = self._inline(body, constants, operands)
            else:
                check_storage(equation)
                results = [self._index(var.aval) for var in equation.outvars]
                numbers = tuple(self._number(equation.primitive.name, var.aval) for var in equation.outvars)
                self.operations.append(Operation(equation, tuple(operands), tuple(results), numbers))
            index |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _number(self, name: str, aval: Any) -> int:
        if not self._rounded or name in EXACT or not is_floating(aval) or not aval.size:
            return 0
        self._count += 1
        return self._count

    def _drop_unused_operations(self) -> None:
        """Remove unused operations, once operations have their numbers, and note the last use of every value."""
        needed, used = set(self.outputs), []
        for operation in reversed(self.operations):
            if not needed.isdisjoint(operation.results) or operation.equation.effects:
                touched = {*operation.operands, *operation.results}
                operation.last_used = tuple(touched - needed)
                needed |= touched
                used.append(operation)
        self.operations = used[::-1]


@dataclass(frozen=True)
class Underflow:
    """The factor of an operation's result if its size is below `limit`."""

    limit: float
    factor: float


class TracedProgram:
    """A trace with a rule bound to every operation: computes values, and tangents in all directions at once."""

    def __init__(self, trace: Trace, has_tangent: Sequence[bool], rule_of: Callable[[Any], Rule], xp: Any) -> None:
        """`has_tangent` is one boolean for each input. Errors: NoRule, for the first operation without a rule."""
        self._trace, self._xp = trace, xp
        value_has_tangent = [False] * len(trace.constants)
        for index, has in zip(trace.inputs, has_tangent, strict=True):
            value_has_tangent[index] = has
        nested = partial(nested_program, rule_of=rule_of, xp=xp)
        for operation in trace.operations:
            rule = rule_of(operation.equation)
            operands = tuple(value_has_tangent[index] for index in operation.operands)
            operation.step, results = rule(operation.equation, operands, nested)
            if any(operation.numbers) and adds_by_index(operation.equation):
                operation.additions = additions_of(rule, operation.equation, nested, xp)
            for index, has, number in zip(operation.results, results, operation.numbers, strict=True):
                value_has_tangent[index] = has or number > 0
        self.output_has_tangent = [value_has_tangent[index] for index in trace.outputs]
        self.length = len(trace.operations)

    def __call__(
        self,
        inputs: Sequence[Any],
        tangents: Sequence[Any],
        tangent_errors: Any = None,
        value_errors: Any = None,
        storage: Storage | None = None,
        additions: float = 0.0,
        underflow: Underflow | None = None,
    ) -> tuple[list, list]:
        """Values and tangents of the outputs, None for an output without a tangent.

        Both kinds of errors are relative to an operation's result: POOL random signs times half a unit in the last
        place. `tangent_errors` has one such row for each direction, added to the tangents; `value_errors` is one row,
        which is added to the values. Numbers that the reference marks as stored are rounded as `storage` says.
        `additions` is the rounding of a sum over repeated indices, in units of the other operations' rounding.
        With `value_errors`, results that underflow are as `underflow` says.
        """
        value: list[Any] = list(self._trace.constants)
        tangent: list[Any] = [None] * len(value)
        for index, x, t in zip(self._trace.inputs, inputs, tangents, strict=True):
            value[index], tangent[index] = x, t
        for operation in self._trace.operations:
            operands = operation.operands
            results, result_tangents = operation.step([value[i] for i in operands], [tangent[i] for i in operands])
            each = zip(operation.results, results, result_tangents, operation.numbers, strict=True)
            for index, y, t, number in each:
                if storage is not None and is_stored(operation.equation):
                    signs = self._errors_of(tangent_errors, y.size, index).reshape((-1, *y.shape))
                    value[index], tangent[index] = storage.rounded(self._xp, y, t, self._xp.sign(signs))
                    continue
                size = self._size(y, operation.equation.primitive.name) if number else None
                if operation.additions is not None and additions:
                    size = self._xp.abs(size) + additions * operation.additions(y, *(value[i] for i in operands))
                if value_errors is not None and size is not None:
                    y = self._off_by(y, size, value_errors, number)
                    if underflow is not None:
                        y = self._xp.where(self._xp.abs(y) < underflow.limit, underflow.factor * y, y)
                value[index] = y
                t = self._exact_where_infinite(y, t)
                tangent[index] = t if size is None else self._with_error(size, t, tangent_errors, number)
            for index in operation.last_used:
                value[index] = tangent[index] = None
        return [value[i] for i in self._trace.outputs], [tangent[i] for i in self._trace.outputs]

    def _exact_where_infinite(self, value: Any, tangent: Any) -> Any:
        """The tangent, with 0 where the value is infinite: rounding the temperature leaves a masked logit masked.

        JAX's own tangent is infinite there, and becomes NaN for the whole row once it is multiplied by a probability of
        0.
        """
        xp = self._xp
        if tangent is None:
            return None
        is_infinite = xp.isinf(value)
        if xp is np and not is_infinite.any():
            return tangent
        return xp.where(is_infinite, 0.0, tangent)

    def _size(self, value: Any, name: str) -> Any:
        """The number that the operation rounds: its result, or 1 if libraries cancel there."""
        return self._xp.maximum(value, 1.0) if name in AS_LARGE_AS_ONE else value

    def _with_error(self, size: Any, tangent: Any, tangent_errors: Any, number: int) -> Any:
        """The tangent plus an error of that size; infinite values get none."""
        xp = self._xp
        errors = self._errors_of(tangent_errors, size.size, number)
        finite = xp.where(xp.isfinite(size), size, 0.0)
        error = errors.reshape((len(tangent_errors), *size.shape)).astype(size.dtype, copy=False) * finite[None]
        return error if tangent is None else tangent + error

    def _off_by(self, value: Any, size: Any, value_errors: Any, number: int) -> Any:
        """The value with an actual error."""
        relative = self._errors_of(value_errors[None], value.size, number).reshape(value.shape)
        off = value * (1.0 + relative) if size is value else value + size * relative
        return off.astype(value.dtype)

    def _errors_of(self, errors: Any, size: int, number: int) -> Any:
        """`size` errors of each row, read from a different place in the pool for each operation."""
        start = number * STRIDE % (POOL // 2)
        read = errors[:, start : start + size]
        if read.shape[1] < size:
            read = self._xp.tile(errors[:, start:], (1, -(-size // (POOL - start))))[:, :size]
        return read


def nested_program(closed: Any, has_tangent: Sequence[bool], rule_of: Callable[[Any], Rule], xp: Any) -> TracedProgram:
    """The program of a function inside an operation, which rounds once as a whole."""
    return TracedProgram(Trace(closed, rounded=False), has_tangent, rule_of, xp)


def evaluator(
    closed: Any, has_tangent: Sequence[bool], compiler_options: Callable[[], Any], *, rounded: bool = True
) -> Callable[..., Any]:
    """(inputs, tangents, tangent_errors, value_errors, storage) -> (values, tangents) of a traced function.

    Operations that are not `rounded` make no errors, and have no tangent if no input has one.
    """
    trace = Trace(closed, rounded)
    if trace.elements <= LARGE * len(trace.operations):
        # If another version of JAX renames a parameter, NumPy has no rule for it.
        with suppress(NoRule, KeyError, AttributeError):
            return by_numpy(trace, has_tangent)
    return by_xla(trace, has_tangent, compiler_options)


def by_numpy(trace: Trace, has_tangent: Sequence[bool]) -> TracedProgram:
    """The program under NumPy's rules. Errors: NoRule, for the first operation without one."""
    return TracedProgram(trace, has_tangent, numpy_rule, np)


def by_xla(trace: Trace, has_tangent: Sequence[bool], compiler_options: Callable[[], Any]) -> Callable[..., Any]:
    """The same program compiled as a whole."""
    import jax
    import jax.numpy as jnp

    program = TracedProgram(trace, has_tangent, lambda equation: by_jax, jnp)
    return jax.jit(
        program.__call__, compiler_options=compiler_options(), static_argnames=("storage", "additions", "underflow")
    )
