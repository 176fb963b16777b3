"""The reference: JAX on full float64 arrays, its gradient for the drawn cotangents, and its sensitivity to rounding.

JAX traces the reference and derives its gradient, once per signature (shapes, dtypes and options); NumPy evaluates the
traced program: outputs, gradients, and their derivatives in eight random directions of rounding, from which the budgets
are computed. XLA compiles only programs that NumPy has no rule for, and programs on large arrays.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared, nested, outputs_by_name, takes_mesh
from shardproof.declare.validation import name_of_reference
from shardproof.draw import inputs
from shardproof.endings.raised import first_line_of, pass_interrupt
from shardproof.engines.ledger import at_users_line
from shardproof.engines.program import Program
from shardproof.judge import bridge, kept_traces
from shardproof.judge.rounding import POOL, Underflow, evaluator
from shardproof.judge.step import DIRECTIONS
from shardproof.judge.storage import storage_of

POINTS = 4  # random inputs, each with its negative: a piecewise derivative that is 0 at one is rarely 0 at the other
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def accumulator_roundoff(dtype: str) -> float:
    """The unit roundoff of the accumulation dtype of `dtype`: float32 or, for float64, float64."""
    return min(UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float32"])


class ReferenceFailure(Exception):
    """The reference could not be evaluated, or its result is invalid."""


@dataclass(frozen=True)
class Reference:
    """Outputs, gradients and, for each, its spread: the root mean square of its changes under rounding."""

    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    output_spread: dict[str, np.ndarray]
    gradient_spread: dict[str, np.ndarray]


@dataclass
class TraceClock:
    """Seconds spent in first calls, which trace and may compile, and their number."""

    seconds: float = 0.0
    count: int = 0


CLOCK = TraceClock()


@dataclass(frozen=True)
class ReferenceInput:
    """An input of the reference: the sum of its addends, and the magnitude that rounding is relative to."""

    total: np.ndarray
    magnitude: np.ndarray


def reference_input(addends: np.ndarray) -> ReferenceInput:
    """The reference's input for a tensor with these addends; a tensor that is not a sum has one."""
    with np.errstate(invalid="ignore"):
        total, magnitude = addends.sum(0), np.abs(addends).sum(0)
    # An infinite (masked) entry is exact: rounding does not change it.
    return ReferenceInput(total, np.where(np.isfinite(magnitude), magnitude, 0.0))


def evaluate(
    scheme: Declared,
    program: Program,
    case: CaseSpec,
    value_errors: np.ndarray | None = None,
    underflow: Underflow | None = None,
) -> Reference:
    """Evaluate the reference on one case; `value_errors` are errors of its operations, see `operation_errors`.

    Errors: ReferenceFailure, with the reference's own exception as its cause.
    """
    bridge.start()
    # 1. The ranks' inputs, unsharded: a partial value is the float64 sum of its rounded addends.
    arrays = {arg.name: program.full_array(arg, case) for arg in scheme.inputs}
    floating = {a.name: reference_input(program.addends(a, case, "input")) for a in scheme.inputs if not a.is_integer}
    cotangents = {arg.name: _cotangent(arg, program, case) for arg in scheme.outputs if arg.differentiable}
    # 2. Integers are fixed; rounding changes floating inputs x and cotangents c.
    fixed = {name: array for name, array in arrays.items() if name not in floating}
    x = {name: item.total for name, item in floating.items()}
    c = {name: item.total for name, item in cotangents.items()}
    # 3. Values and gradients, and the change of each element under random rounding of x, c and every intermediate.
    directions = _directions(scheme, case, "", floating), _directions(scheme, case, "c ", cotangents)
    ((y, g), aux), ((dy, dg), _) = _call(
        scheme, case, (fixed, x, c), directions, _tangent_errors(scheme, case), value_errors, underflow
    )
    return Reference(
        {name: np.array(value) for name, value in {**y, **aux}.items()},
        {name: np.array(value) for name, value in g.items()},
        {name: _spread(y[name], tangents) for name, tangents in dy.items()},
        {name: _spread(g[name], tangents) for name, tangents in dg.items()},
    )


def check_repeats(scheme: Declared, program: Program, case: CaseSpec, reference: Reference) -> None:
    """Trace the reference again, once for each reference. Errors: ReferenceFailure if its numbers are others then."""
    if scheme.reference in kept_traces.REPEATED:
        return
    kept_traces.forget(scheme.reference)
    again = evaluate(scheme, program, case)
    for before, after in ((reference.outputs, again.outputs), (reference.gradients, again.gradients)):
        for name, array in before.items():
            if not np.array_equal(array, after[name], equal_nan=array.dtype.kind == "f"):
                raise _failure(
                    scheme,
                    f"gives other numbers for '{name}' when it is traced again: it reads a random generator, a clock "
                    "or kept state; draw as an input what it needs",
                )
    kept_traces.REPEATED.add(scheme.reference)


def undefined_gradients(
    scheme: Declared, program: Program, case: CaseSpec, reference: Reference
) -> dict[str, np.ndarray]:
    """For each input, the elements that a NaN output depends on: their gradient is undefined.

    The dependence is found at ordinary inputs, with cotangents for the NaN outputs only. If a NaN output has no
    cotangent, an element also counts if its gradient is NaN at the case's own inputs: a message that carries the output
    together with others carries zeros back, and 0 * nan is nan.
    """
    is_nan = {arg.name: np.isnan(reference.outputs[arg.name]) for arg in scheme.outputs if arg.differentiable}
    if not any(mask.any() for mask in is_nan.values()):
        return {}
    unused = case.conditions.get("unused", ())
    case = case.replace(conditions={name: value for name, value in case.conditions.items() if name != "unused"})
    arrays = {arg.name: program.full_array(arg, case) for arg in scheme.inputs}
    floating = [arg.name for arg in scheme.inputs if not arg.is_integer]
    fixed = {name: array for name, array in arrays.items() if name not in floating}
    c = {name: mask.astype(np.float64) for name, mask in is_nan.items()}

    def gradient_at(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        zeros = tuple({name: np.zeros((DIRECTIONS, *a.shape)) for name, a in each.items()} for each in (x, c))
        ((_, g), _), _ = _call(scheme, case, (fixed, x, c), zeros, np.zeros((DIRECTIONS, POOL)))
        return {name: np.asarray(gradient) for name, gradient in g.items()}

    dependent: dict[str, np.ndarray] = {}
    for point in range(POINTS):
        rng, sign = inputs.generator(case, f"ordinary {point // 2}"), (1.0, -1.0)[point % 2]
        x = {name: sign * rng.standard_normal(arrays[name].shape) for name in floating}
        for name, gradient in gradient_at(x).items():
            dependent[name] = dependent.get(name, False) | (gradient != 0.0)
    if any(is_nan[name].any() for name in unused if name in is_nan):
        for name, gradient in gradient_at({name: arrays[name] for name in floating}).items():
            dependent[name] = dependent.get(name, False) | np.isnan(gradient)
    return dependent


def _cotangent(arg: Argument, program: Program, case: CaseSpec) -> ReferenceInput:
    """The cotangent of an output: zeros if its gradient is not compared, 1 for the loss of a scheme with `module=`."""
    if arg.modified or program.module:
        is_loss = not arg.modified and arg.name == program.outputs[0].name
        return ReferenceInput(np.full(arg.shape(case), float(is_loss)), np.zeros(arg.shape(case)))
    addends = program.addends(arg, case, "cotangent")
    is_nan = arg.name in case.conditions.get("nan_cotangents", ())  # in rows that no gradient depends on
    return reference_input(np.where(np.isnan(addends), 0.0, addends) if is_nan else addends)


def _call(
    scheme: Declared,
    case: CaseSpec,
    arrays: Any,
    directions: Any,
    tangent_errors: np.ndarray,
    value_errors: np.ndarray | None = None,
    underflow: Underflow | None = None,
) -> Any:
    """Values and tangents from the traced program of this signature; times its first call."""
    import jax

    options = {name: case.options[name] for name in scheme.options if name in case.options}
    output_shapes = {arg.name: arg.shape(case) for arg in scheme.outputs}
    fixed, x, _ = arrays
    shapes = tuple((name, a.shape, str(a.dtype)) for name, a in {**fixed, **x}.items())
    roles = tuple((arg.name, arg.differentiable) for arg in (*scheme.inputs, *scheme.outputs)), scheme.output_form
    chosen = tuple(sorted((name, repr(value)) for name, value in options.items()))
    mesh = {axis: case.mesh[axis] for axis in scheme.mesh} if takes_mesh(scheme.reference) else {}
    keywords = {**options, "mesh": mesh} if mesh else options
    unused = tuple(case.conditions.get("unused", ()))
    signature = roles, shapes, tuple(output_shapes.values()), chosen, tuple(mesh.items()), unused
    programs = kept_traces.programs_of(scheme.reference)
    tangents = [*(None for _ in fixed), *jax.tree.leaves(directions)]
    flat = jax.tree.leaves(arrays), tangents, tangent_errors, value_errors
    storage = storage_of(case.dtype) if scheme.sums else None
    additions = _unit_of_additions(scheme, case) / operation_unit(scheme, case)
    how = {"storage": storage, "additions": additions, "underflow": underflow}
    if signature in programs:
        program, structure = programs[signature]
        with np.errstate(all="ignore"):
            results = program(*flat, **how)
    else:
        # The first call of a signature traces, which is most of a reference's cost.
        start = time.perf_counter()
        kept_traces.make_room()
        try:
            with np.errstate(all="ignore"):
                program, structure = _build(scheme, keywords, output_shapes, unused, arrays)
                results = program(*flat, **how)
        except ReferenceFailure:
            raise
        except BaseException as error:
            pass_interrupt(error)
            raised_at = at_users_line(error)
            message = f"raised {type(error).__name__}{raised_at}: {_first_line(error)}"
            raise _failure(scheme, message + _remedy(error, case), is_placed=bool(raised_at)) from error
        kept_traces.programs_of(scheme.reference)[signature] = program, structure
        CLOCK.seconds += time.perf_counter() - start
        CLOCK.count += 1
    return tuple(jax.tree.unflatten(structure, leaves) for leaves in results)


def _build(
    scheme: Declared,
    keywords: Mapping[str, Any],
    output_shapes: Mapping[str, tuple[int, ...]],
    unused: Sequence[str],
    arrays: Any,
) -> tuple[Any, Any]:
    """The evaluator of ((outputs, gradients), integer outputs) as a function of (fixed, x, c), and their structure.

    `keywords` are the options and, if the reference takes it, the mesh. `unused` outputs have no cotangent and take no
    part in the gradient: 0 times an infinite derivative of one would be NaN.
    """
    import jax

    active = [arg.name for arg in scheme.inputs if arg.differentiable]
    integer = {arg.name for arg in scheme.outputs if not arg.differentiable}

    def split(arguments: Any) -> tuple[Any, Any]:
        parts = _checked_outputs(
            scheme, output_shapes, bridge.call_reference(scheme.reference, **nested(arguments), **keywords)
        )
        without = {*integer, *unused}
        return {n: v for n, v in parts.items() if n not in without}, {n: v for n, v in parts.items() if n in without}

    def value_and_gradient(fixed: Any, x: Any, c: Any) -> tuple[tuple[Any, Any], Any]:
        differentiable = {name: x[name] for name in active}
        y, pullback, aux = jax.vjp(lambda x_active: split({**fixed, **x, **x_active}), differentiable, has_aux=True)
        (gradients,) = pullback({name: c[name] for name in y})
        y.update({name: aux.pop(name) for name in unused})
        return (y, gradients), aux

    closed, shapes = bridge.traced(scheme.reference, value_and_gradient, arrays)
    fixed, x, c = arrays
    has_tangent = [False] * len(fixed) + [True] * (len(x) + len(c))
    return evaluator(closed, has_tangent, compiler_options), jax.tree.structure(shapes)


def evaluated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of pytrees of arrays, traced once per signature and evaluated like a reference."""
    programs: dict[Any, tuple[Any, Any]] = {}

    def call(*arguments: Any) -> Any:
        import jax

        leaves, structure = jax.tree.flatten(arguments)
        arrays = [np.asarray(leaf) for leaf in leaves]
        signature = structure, tuple((array.shape, array.dtype) for array in arrays)
        if signature not in programs:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
            program = evaluator(closed, [False] * len(arrays), compiler_options, rounded=False)
            programs[signature] = program, jax.tree.structure(shapes)
        program, returned = programs[signature]
        with np.errstate(all="ignore"):
            values, _ = program(arrays, [None] * len(arrays))
        return jax.tree.unflatten(returned, values)

    return call


@cache
def compiler_options() -> dict[str, Any]:
    """Options that this XLA accepts.

    They turn optimization off: arrays are small and every shape compiles, so it costs more than it saves.
    """
    import jax

    accepted: dict[str, Any] = {}
    for option in ({"xla_backend_optimization_level": 0}, {"xla_cpu_use_fusion_emitters": False}):
        try:
            jax.jit(lambda x: x, compiler_options=option)(0.0)
        except Exception:  # its type differs between versions; unknown options are left out
            continue
        accepted |= option
    return accepted


def _checked_outputs(scheme: Declared, output_shapes: Mapping[str, tuple[int, ...]], returned: Any) -> dict[str, Any]:
    """The reference's outputs by name, after checks of their number, type and shape."""
    try:
        outputs = outputs_by_name(returned, list(output_shapes), scheme.output_form)
    except ValueError as error:
        raise _failure(scheme, str(error)) from None
    for arg in scheme.outputs:
        _check_output(scheme, arg, outputs[arg.name], output_shapes[arg.name])
    return outputs


def _check_output(scheme: Declared, arg: Argument, part: Any, shape: tuple[int, ...]) -> None:
    import jax
    import jax.numpy as jnp

    if not isinstance(part, jax.Array):
        raise _failure(scheme, f"returned {type(part).__name__} for '{arg.name}'; return a JAX array")
    if part.shape != shape:
        says = f"returned {part.shape} for '{arg.name}', '{arg.spec}' says {shape}"
        raise _failure(scheme, says + scheme.remedy_of_sizes(arg, part.shape, shape))
    is_floating = jnp.issubdtype(part.dtype, jnp.floating)
    if is_floating and part.dtype != jnp.float64:
        raise _failure(
            scheme,
            f"returned {part.dtype} for '{arg.name}' from float64 inputs; "
            "drop the cast, the reference states the mathematics in float64",
        )
    if is_floating == arg.is_integer:
        kind = "integer by" if arg.is_integer else "floating without Int or Bool of jaxtyping in"
        raise _failure(
            scheme, f"returned {part.dtype} for '{arg.name}', which is {kind} the scheme's return annotation"
        )


def _directions(scheme: Declared, case: CaseSpec, prefix: str, tensors: Mapping[str, ReferenceInput]) -> dict[str, Any]:
    """DIRECTIONS directions: a random sign times half a unit in the last place for each number."""
    by_name = {}
    for name, item in tensors.items():
        half_ulp = unit_of_inputs(scheme, case) * item.magnitude
        signs = inputs.generator(case, f"direction {prefix}{name}").integers(0, 2, size=(DIRECTIONS, *half_ulp.shape))
        by_name[name] = (2.0 * signs - 1.0) * half_ulp
    return by_name


def _tangent_errors(scheme: Declared, case: CaseSpec) -> np.ndarray:
    """For each direction, relative errors of the operations: random signs times the unit roundoff of one operation."""
    signs = 2.0 * inputs.generator(case, "rounding").integers(0, 2, size=(DIRECTIONS, POOL)) - 1.0
    return operation_unit(scheme, case) * signs


def operation_errors(scheme: Declared, case: CaseSpec, name: str) -> np.ndarray:
    """Relative errors that the reference's operations could actually make, different for each name.

    They differ in size too, so that equal intermediates get any order: all with the larger error would stay equal.
    """
    rng = inputs.generator(case, name)
    signs = 2.0 * rng.integers(0, 2, size=POOL) - 1.0
    return operation_unit(scheme, case) * signs * rng.uniform(0.5, 1.0, POOL)


def unit_of_inputs(scheme: Declared, case: CaseSpec) -> float:
    """The rounding of inputs and cotangents that a budget allows for: to the tested dtype, or to the dtype of sums.

    Inputs are numbers of the tested dtype. A function that promises `sums="float32"` rounds nothing else to it but its
    results, so its error before the last rounding is float32's.
    """
    return accumulator_roundoff(case.dtype) if scheme.sums else UNIT_ROUNDOFF[case.dtype]


def operation_unit(scheme: Declared, case: CaseSpec) -> float:
    """Intermediates have the accumulation dtype, unless the scheme says that some are stored in a narrower dtype."""
    if scheme.inside:
        return max(UNIT_ROUNDOFF[scheme.inside], accumulator_roundoff(case.dtype))
    are_stored = scheme.roundings > 1 and not scheme.sums
    return UNIT_ROUNDOFF[case.dtype] if are_stored else accumulator_roundoff(case.dtype)


def _unit_of_additions(scheme: Declared, case: CaseSpec) -> float:
    """Libraries may add rows of one index in the dtype of the tensor; sums that are promised in float32 are not."""
    return max(unit_of_inputs(scheme, case), operation_unit(scheme, case))


def _spread(value: Any, derivatives: Any) -> np.ndarray:
    return np.zeros(value.shape) if derivatives is None else _rms(derivatives)


def _rms(derivatives: Any) -> np.ndarray:
    """Root mean square over the directions with a finite derivative; 0 if there is none."""
    array = np.asarray(derivatives, dtype=np.float64)
    finite = np.isfinite(array)
    array = np.where(finite, array, 0.0)
    largest = np.abs(array).max(axis=0, initial=0.0)
    scale = np.where(largest > 0, largest, 1.0)  # squares of large or small elements would overflow or vanish
    return scale * np.sqrt(((array / scale) ** 2).sum(0) / np.maximum(finite.sum(0), 1))


def _declared_at(reference: Callable[..., Any]) -> str:
    """` (file:line)` of a function; empty if Python did not compile it."""
    code = getattr(inspect.unwrap(reference), "__code__", None)
    return "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _failure(scheme: Declared, message: str, is_placed: bool = False) -> ReferenceFailure:
    """The message after the reference's name, and its place unless the message has one."""
    name, place = name_of_reference(scheme.reference), "" if is_placed else _declared_at(scheme.reference)
    return ReferenceFailure(f"scheme '{scheme.name}': {name}{place} {message}")


INTEGERS_ONLY = re.compile(r"integer\b.* type.*\bfloat\d")  # JAX's words on ids that are floats
SIZE_ERRORS = (ArithmeticError, AssertionError, IndexError, TypeError, ValueError)  # raised by some sizes


def _remedy(error: BaseException, case: CaseSpec) -> str:
    """The remedy for an exception of the reference."""
    import jax

    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "; JAX traces a reference: write jnp.where or jax.lax.cond if a value decides"
    if "racer" in str(error):  # JAX's Tracer, which torch and NumPy functions do not accept
        return "; JAX traces a reference: write jnp and jax, not torch or numpy"
    if isinstance(error, jax.dtypes.TypePromotionError):
        inside = bridge.raised_inside_jax(error)
        if inside is not None:
            return f"; {inside} computes in float32 inside JAX: write its formula in jnp, which keeps float64"
        return "; a reference does not mix floats of two widths: convert one, as in table.astype(x.dtype)"
    if isinstance(error, TypeError) and INTEGERS_ONLY.search(str(error)):
        return "; an input without a draw has floats: give ids theirs, as draw={'ids': token_below('v')}"
    if not isinstance(error, SIZE_ERRORS) or not case.dims:
        return ""
    sizes = " ".join(f"{name}={size}" for name, size in case.dims.items())
    return f"; if the reference does not support {sizes}, declare the sizes that it supports: dims={{...}} or assume="


def _first_line(error: BaseException) -> str:
    line = first_line_of(error) or "no message"
    line = line.partition(" when jax_numpy_dtype_promotion=strict")[0]
    what, strict, _ = line.partition(" and with the config option jax_numpy_rank_promotion")
    return (
        f"{what}; a reference broadcasts explicitly: write bias[None, None] for a bias that lacks two dims"
        if strict
        else line
    )
