"""NumPy's rule for each JAX primitive that references use: its value, and its tangents in all directions.

At ties and outside a function's domain, derivatives are JAX's: equal maxima share a tangent, and 0 * inf is nan.
Integers keep their dtype and divide as in XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardproof.judge import control_flow, indexing
from shardproof.judge.step import DIRECTIONS, NoRule, Rule, Step, constant, derived, elementwise, linear
from shardproof.judge.storage import is_stored

DTYPES = frozenset(map(np.dtype, ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
DTYPES |= {np.dtype("float32"), np.dtype("float64")}


def numpy_rule(equation: Any) -> Rule:
    """The rule of an equation's primitive. Errors: NoRule, with the primitive's name."""
    name = equation.primitive.name
    unsupported_dtypes = {var.aval.dtype for var in (*equation.invars, *equation.outvars)} - DTYPES
    if name not in RULES or unsupported_dtypes or equation.effects or equation.params.get("out_dtype"):
        raise NoRule(f"{name} {unsupported_dtypes or ''}")
    return RULES[name]


# Values, if NumPy's function of that name differs from XLA's.


def division(equation: Any) -> Callable[..., Any]:
    """Integer division rounds towards zero; division by zero gives -1."""

    def quotient(x: Any, y: Any) -> Any:
        z = np.floor_divide(x, y)
        z = z + ((np.remainder(x, y) != 0) & ((x < 0) != (y < 0))).astype(z.dtype)
        return np.where(y == 0, np.asarray(-1).astype(z.dtype), z)

    return quotient


def remainder(equation: Any) -> Callable[..., Any]:
    """With the sign of the dividend; integers modulo zero give the dividend."""
    if equation.outvars[0].aval.dtype.kind == "f":
        return np.fmod
    return lambda x, y: np.where(y == 0, x, np.fmod(x, y))


def by_kind(float_rule: Rule, integer_rule: Rule) -> Rule:
    def rule(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        chosen = float_rule if equation.outvars[0].aval.dtype.kind == "f" else integer_rule
        return chosen(equation, has_tangent, nested)

    return rule


def conversion(equation: Any, lead: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Floats convert to the nearest representable integer, nan to 0."""
    source, target = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if source.kind != "f" or target.kind not in "iu":
        return lambda x: x.astype(target)
    lowest, highest = np.iinfo(target).min, np.iinfo(target).max

    def nearest(x: Any) -> Any:
        inside = (x > float(lowest)) & (x < float(highest))
        bounded = np.where(x > 0, highest, lowest).astype(target)
        return np.where(inside, np.where(inside, x, 0).astype(target), np.where(np.isnan(x), 0, bounded).astype(target))

    return nearest


def with_bits(equation: Any) -> Callable[..., Any]:
    """The same bits as another dtype of the same size."""
    source, target = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if source.itemsize != target.itemsize:
        raise NoRule(f"{equation.primitive.name} from {source} to {target}")
    return lambda x: np.asarray(x).view(target)


def rounding(equation: Any) -> Callable[..., Any]:
    if int(equation.params["rounding_method"]) == 1:  # RoundingMethod.TO_NEAREST_EVEN
        return np.rint
    below_half = np.nextafter(0.5, 0.0)
    return lambda x: np.trunc(x + np.copysign(below_half, x).astype(x.dtype))


def shift(function: Callable[..., Any], unsigned: bool) -> Callable[..., Any]:
    def build(equation: Any) -> Callable[..., Any]:
        dtype = equation.outvars[0].aval.dtype
        bits = np.dtype(f"u{dtype.itemsize}") if unsigned else dtype
        return lambda x, y: function(x.astype(bits), y.astype(bits)).astype(dtype)

    return build


def total_order(x: Any) -> Any:
    """Integers that sort like floats in total order: -NaN, -inf, ..., -0, +0, ..., inf, NaN. Integers are unchanged."""
    if x.dtype.kind != "f":
        return x
    bits = np.asarray(x).view(f"i{x.dtype.itemsize}")
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def platform_index(equation: Any) -> Callable[..., Any]:
    """The index of the CPU's branch, else of the default branch, if JAX has several versions of a function."""
    platforms = equation.params["platforms"]
    index = next((i for i, names in enumerate(platforms) if names and "cpu" in names), platforms.index(None))
    return lambda: np.int32(index)


def bits_set(equation: Any) -> Callable[..., Any]:
    dtype = equation.outvars[0].aval.dtype
    return lambda x: np.bitwise_count(x.astype(f"u{dtype.itemsize}")).astype(dtype)


def iota(equation: Any) -> Callable[..., Any]:
    shape, dim, dtype = (equation.params[name] for name in ("shape", "dimension", "dtype"))
    along = [shape[dim] if d == dim else 1 for d in range(len(shape))]
    return lambda: np.broadcast_to(np.arange(shape[dim]).astype(dtype).reshape(along), shape)


def position(function: Callable[..., Any]) -> Callable[..., Any]:
    def build(equation: Any) -> Callable[..., Any]:
        [axis] = equation.params["axes"]
        return lambda x: function(x, axis).astype(equation.params["index_dtype"])

    return build


def clamp(equation: Any) -> Callable[..., Any]:
    return lambda lowest, x, highest: np.minimum(np.maximum(x, lowest), highest)


def storage_rule(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """The rule of `jax_ref.stored`: the identity; rounding.py rounds. Errors: NoRule for another precision."""
    if not is_stored(equation):
        raise NoRule(f"{equation.primitive.name} to {equation.params['mantissa_bits']} bits")
    return linear(same)(equation, has_tangent, nested)


# Elementwise operations with a parameter or a choice.


def integer_power(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    y, dtype = equation.params["y"], equation.outvars[0].aval.dtype

    def power(x: Any, y: int) -> Any:
        if y < 0:
            return 1 / power(x, -y)
        return x * x if y == 2 else np.power(x, np.asarray(y).astype(dtype))

    derivative = (lambda t, z, x: np.zeros_like(t)) if y == 0 else (lambda t, z, x: t * (y * power(x, y - 1)))
    return elementwise(lambda x: power(x, y), derivative)(equation, has_tangent, nested)


def by_exponent(t: Any, z: Any, x: Any, y: Any) -> Any:
    """The tangent of a power by its exponent; 0 for a base of 0."""
    return t * (np.log(np.where(x == 0, 1.0, x)) * z)


def larger(function: Callable[..., Any]) -> Rule:
    """The larger or smaller of two; at a tie each gets half of the tangent."""

    def share(mine: Any, other: Any, z: Any) -> Any:
        return (mine == z) / np.where(other == z, 2.0, 1.0)

    return elementwise(
        function,
        lambda t, z, x, y: t * share(x, y, z).astype(z.dtype),
        lambda t, z, x, y: t * share(y, x, z).astype(z.dtype),
    )


def extreme(ufunc: np.ufunc, is_minimum: bool) -> Rule:
    """reduce_max and reduce_min: elements at a tie share the tangent equally."""

    def rule(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
        axes = tuple(map(int, equation.params["axes"]))
        dtype = equation.outvars[0].aval.dtype
        if dtype.kind == "f":
            initial = math.inf if is_minimum else -math.inf
        else:
            limits = (False, True) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            initial = limits[is_minimum]
        behind_lead = tuple(axis + 1 for axis in axes)

        def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            [x], [t] = values, tangents
            z = ufunc.reduce(x, axes, keepdims=True, initial=initial)
            result = z.reshape(equation.outvars[0].aval.shape)
            if t is None:
                return (result,), (None,)
            extremes = x == z
            return (result,), ((t * extremes).sum(behind_lead) / extremes.sum(axes),)

        return step, (any(has_tangent),)

    return rule


def select(equation: Any, lead: tuple[int, ...]) -> Callable[..., Any]:
    if len(equation.invars) == 3:
        return lambda which, no, yes: np.where(which, yes, no)

    def chosen(which: Any, *cases: Any) -> Any:
        result = cases[-1]
        for number in range(len(cases) - 2, -1, -1):
            result = np.where(which <= number, cases[number], result)
        return result

    return chosen


# Sorting: the values determine the order, and tangents are permuted with them.


def reorder(order: Callable[..., Any], count: int, with_index: bool, axis: int) -> Step:
    """Sort by `order` along the axis and keep the first `count`; `with_index` also returns the positions, for top_k."""

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        index = order(*values).take(range(count), axis)
        results = [np.take_along_axis(x, index, axis) for x in values]
        result_tangents = [None if t is None else np.take_along_axis(t, index[None], axis + 1) for t in tangents]
        if with_index:
            return (*results, index.astype(np.int32)), (*result_tangents, None)
        return results, result_tangents

    return step


def sort(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """Sort by the first keys, nan last; stable."""
    axis, keys = equation.params["dimension"], equation.params["num_keys"]
    order = lambda *values: np.lexsort(values[:keys][::-1], axis=axis)  # noqa: E731
    return reorder(order, equation.invars[0].aval.shape[axis], False, axis), tuple(has_tangent)


def top_k(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """The largest first, nan above all; at a tie the first."""
    aval = equation.invars[0].aval
    axis = equation.params.get("axis", aval.ndim - 1) % aval.ndim
    size = aval.shape[axis]

    def order(x: Any) -> Any:
        return size - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)

    return reorder(order, equation.params["k"], True, axis), (*has_tangent, False)


# Products.


def dot_general(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """Both operands as [batch..., rows, columns], then one matrix product."""
    (contracted, batch), out = equation.params["dimension_numbers"], equation.outvars[0].aval
    shapes = [var.aval.shape for var in equation.invars]
    free = [
        [d for d in range(len(shape)) if d not in c and d not in b]
        for shape, c, b in zip(shapes, contracted, batch, strict=True)
    ]
    batch_shape = tuple(shapes[0][d] for d in batch[0])
    rows, columns = (math.prod(shape[d] for d in dims) for shape, dims in zip(shapes, free, strict=True))
    inner = math.prod(shapes[0][d] for d in contracted[0])
    orders = (*batch[0], *free[0], *contracted[0]), (*batch[1], *contracted[1], *free[1])
    matrices = (*batch_shape, rows, inner), (*batch_shape, inner, columns)

    def matrix(side: int, x: Any) -> Any:
        return x.astype(out.dtype, copy=False).transpose(orders[side]).reshape(matrices[side])

    def tangent_matrix(side: int, t: Any) -> Any:
        order = (0, *(d + 1 for d in orders[side]))
        return t.astype(out.dtype, copy=False).transpose(order).reshape(DIRECTIONS, *matrices[side])

    def step(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        left, right = matrix(0, values[0]), matrix(1, values[1])
        tangent = None
        if tangents[0] is not None:
            tangent = tangent_matrix(0, tangents[0]) @ right
        if tangents[1] is not None:
            by_right = left @ tangent_matrix(1, tangents[1])
            tangent = by_right if tangent is None else tangent + by_right
        result = (left @ right).reshape(out.shape)
        return (result,), (None if tangent is None else tangent.reshape(DIRECTIONS, *out.shape),)

    return step, (any(has_tangent),)


def same(equation: Any, lead: tuple[int, ...]) -> Callable[..., Any]:
    return (lambda *values: values) if equation.primitive.multiple_results else lambda x: x


def custom_jvp(equation: Any, has_tangent: Sequence[bool], nested: Any) -> tuple[Step, Sequence[bool]]:
    """A function with a custom derivative; without tangents it is called like any other."""
    body = nested(equation.params["call_jaxpr"], has_tangent)
    return body, (False,) * len(equation.outvars)


def plain(function: Callable[..., Any]) -> Rule:
    """The rule of a piecewise constant function."""
    return constant(lambda equation: function)


def traced(function: Callable[..., Any]) -> Rule:
    """The rule of a less common function; JAX traces its derivative."""
    return derived(plain(function))


def special(name: str) -> Callable[..., Any]:
    def function(*operands: Any) -> Any:
        from scipy import special  # JAX needs it as well; imported at first use

        return getattr(special, name)(*operands)

    return function


RULES: dict[str, Rule] = {
    # Shapes and places.
    "reshape": linear(indexing.reshaped),
    "squeeze": linear(indexing.reshaped),
    "broadcast_in_dim": linear(indexing.broadcast_in_dim),
    "transpose": linear(indexing.transpose),
    "rev": linear(indexing.reverse),
    "slice": linear(indexing.sliced),
    "concatenate": linear(indexing.concatenate),
    "stack": linear(indexing.stack),
    "unstack": linear(indexing.unstack),
    "split": linear(indexing.split),
    "tile": linear(indexing.tile),
    "pad": linear(indexing.pad),
    "dynamic_slice": linear(indexing.dynamic_slice),
    "dynamic_update_slice": linear(indexing.dynamic_update_slice),
    "gather": linear(indexing.gather),
    "scatter": linear(indexing.scatter(None)),
    "scatter-add": linear(indexing.scatter(np.add)),
    "scatter-mul": derived(constant(indexing.scatter(np.multiply))),
    "scatter-min": derived(constant(indexing.scatter(np.minimum))),
    "scatter-max": derived(constant(indexing.scatter(np.maximum))),
    "select_n": linear(select),
    "copy": linear(same),
    "reduce_precision": storage_rule,
    "name": linear(same),
    "optimization_barrier": linear(same),
    "convert_element_type": by_kind(linear(conversion), constant(conversion)),
    "iota": constant(iota),
    "empty2": constant(lambda equation: lambda: np.zeros((), equation.params["dtype"])),  # a number that nothing reads
    # Sums and products.
    "reduce_sum": linear(indexing.reduction(np.add)),
    "cumsum": linear(indexing.accumulation(np.add)),
    "dot_general": dot_general,
    "reduce_prod": derived(constant(indexing.reduction(np.multiply))),
    "cumprod": derived(constant(indexing.accumulation(np.multiply))),
    "cumlogsumexp": derived(constant(indexing.accumulation(np.logaddexp))),
    "add": elementwise(np.add, lambda t, z, x, y: t, lambda t, z, x, y: t),
    "add_any": elementwise(np.add, lambda t, z, x, y: t, lambda t, z, x, y: t),
    "sub": elementwise(np.subtract, lambda t, z, x, y: t, lambda t, z, x, y: -t),
    "mul": elementwise(np.multiply, lambda t, z, x, y: t * y, lambda t, z, x, y: t * x),
    "div": by_kind(
        elementwise(np.divide, lambda t, z, x, y: t / y, lambda t, z, x, y: -t * x * (1 / (y * y))), constant(division)
    ),
    "rem": by_kind(derived(constant(remainder)), constant(remainder)),
    # Elementwise.
    "neg": elementwise(np.negative, lambda t, z, x: -t),
    "abs": elementwise(np.abs, lambda t, z, x: np.where(x >= 0, t, -t)),
    "square": elementwise(np.square, lambda t, z, x: t * (2 * x)),
    "one_minus_square": elementwise(lambda x: (1 + x) * (1 - x), lambda t, z, x: t * (-2 * x)),  # of JAX 0.12
    "integer_pow": integer_power,
    "pow": elementwise(
        lambda x, y: np.power(x, y.astype(x.dtype)), lambda t, z, x, y: t * (y * np.power(x, y - 1)), by_exponent
    ),
    "sqrt": elementwise(np.sqrt, lambda t, z, x: t * (0.5 / z)),
    "rsqrt": elementwise(lambda x: 1 / np.sqrt(x), lambda t, z, x: t * (-0.5 * (z / x))),
    "cbrt": traced(np.cbrt),
    "exp": elementwise(np.exp, lambda t, z, x: t * z),
    "exp2": traced(np.exp2),
    "expm1": elementwise(np.expm1, lambda t, z, x: t * (z + 1)),
    "log": elementwise(np.log, lambda t, z, x: t / x),
    "log1p": elementwise(np.log1p, lambda t, z, x: t / (x + 1)),
    "logistic": elementwise(lambda x: 1 / (1 + np.exp(-x)), lambda t, z, x: t * (z * (1 - z))),
    "tanh": elementwise(np.tanh, lambda t, z, x: t * ((1 + z) * (1 - z))),
    "sin": elementwise(np.sin, lambda t, z, x: t * np.cos(x)),
    "cos": elementwise(np.cos, lambda t, z, x: -(t * np.sin(x))),
    "erf": elementwise(special("erf"), lambda t, z, x: t * (2 / math.sqrt(math.pi) * np.exp(-x * x))),
    "erfc": elementwise(special("erfc"), lambda t, z, x: -t * (2 / math.sqrt(math.pi) * np.exp(-x * x))),
    "erf_inv": traced(special("erfinv")),
    "lgamma": traced(special("gammaln")),
    "digamma": traced(special("psi")),
    "polygamma": traced(special("polygamma")),
    **{name: traced(getattr(np, name)) for name in ("tan", "sinh", "cosh")},
    **{name: traced(getattr(np, f"arc{name[1:]}")) for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
    "atan2": traced(np.arctan2),
    **{name: plain(getattr(np, name)) for name in ("floor", "ceil", "sign", "nextafter")},
    "round": constant(rounding),
    "is_finite": plain(np.isfinite),
    "stop_gradient": plain(lambda x: x),
    # Choices and orders.
    "max": larger(np.maximum),
    "min": larger(np.minimum),
    "reduce_max": extreme(np.maximum, is_minimum=False),
    "reduce_min": extreme(np.minimum, is_minimum=True),
    "cummax": derived(constant(indexing.accumulation(np.maximum))),
    "cummin": derived(constant(indexing.accumulation(np.minimum))),
    "clamp": derived(constant(clamp)),
    "argmax": constant(position(np.argmax)),
    "argmin": constant(position(np.argmin)),
    "sort": sort,
    "top_k": top_k,
    # Integers and booleans.
    **{name: plain(getattr(np, f"bitwise_{name}")) for name in ("and", "or", "xor", "not")},
    **{f"reduce_{name}": constant(indexing.reduction(getattr(np, f"bitwise_{name}"))) for name in ("and", "or", "xor")},
    "eq": plain(np.equal),
    "ne": plain(np.not_equal),
    "lt": plain(np.less),
    "le": plain(np.less_equal),
    "lt_to": plain(lambda x, y: np.less(total_order(x), total_order(y))),
    "le_to": plain(lambda x, y: np.less_equal(total_order(x), total_order(y))),
    "gt": plain(np.greater),
    "ge": plain(np.greater_equal),
    "bitcast_convert_type": constant(with_bits),
    "shift_left": constant(shift(np.left_shift, unsigned=False)),
    "shift_right_logical": constant(shift(np.right_shift, unsigned=True)),
    "shift_right_arithmetic": constant(shift(np.right_shift, unsigned=False)),
    "population_count": constant(bits_set),
    # Branches, loops, and functions with a custom derivative.
    "cond": control_flow.cond,
    "platform_index": constant(platform_index),
    "while": control_flow.while_loop,
    "scan": control_flow.scan,
    "custom_jvp_call": derived(custom_jvp),
}
