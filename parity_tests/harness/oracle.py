"""The reference: JAX on whole float64 arrays, its gradient for the drawn cotangents, and how much rounding moves it.

One jitted function per signature gives outputs, gradients, and their derivative in eight random directions of
rounding, from which the budgets are computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from parity_tests.harness import bridge, inputs
from parity_tests.harness.case import CaseSpec
from parity_tests.harness.program import Argument, Program

if TYPE_CHECKING:
    from parity_tests.harness.scheme import Scheme

DIRECTIONS = 8
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class ReferenceFailure(Exception):
    """The reference itself could not be evaluated, or returned what it must not."""


@dataclass(frozen=True)
class Reference:
    """Values, gradients and, for each, the root mean square of what rounding the inputs does to it."""

    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    output_spread: dict[str, np.ndarray]
    gradient_spread: dict[str, np.ndarray]


@dataclass
class CompileClock:
    """Seconds spent in first calls, which compile, and how many there were."""

    seconds: float = 0.0
    count: int = 0


CLOCK = CompileClock()
_COMPILED: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Fed:
    """What the reference is given for one tensor: the sum of the addends, and how far rounding may move it."""

    total: np.ndarray
    magnitude: np.ndarray


def feed(arg: Argument, array: np.ndarray, case: CaseSpec, kind: str) -> Fed:
    terms = inputs.addends(arg, array, case, kind)
    with np.errstate(invalid="ignore"):
        total, magnitude = terms.sum(0), np.abs(terms).sum(0)
    # A masked (infinite) entry is exact: rounding does not move it.
    return Fed(total, np.where(np.isfinite(magnitude), magnitude, 0.0))


def evaluate(scheme: Scheme, program: Program, case: CaseSpec) -> Reference:
    """The reference's verdict on one case. Errors: ReferenceFailure with the reference's own exception inside."""
    bridge.start()
    arrays = {
        arg.name: program.arrays[arg.name] if program.arrays else inputs.whole(arg, scheme.draws[arg.name], case)
        for arg in scheme.inputs
    }
    fed = {a.name: feed(a, arrays[a.name], case, "input") for a in scheme.inputs if not a.is_integer}
    wanted = [arg for arg in scheme.outputs if arg.differentiable]
    cotangents = {
        arg.name: feed(
            arg,
            program.cotangents[arg.name] if program.cotangents else inputs.cotangent(arg, case),
            case,
            "cotangent",
        )
        for arg in wanted
    }
    active = [arg.name for arg in scheme.inputs if arg.differentiable]
    fixed = {
        name: bridge.to_jax(name, arrays[name] if name not in fed else fed[name].total)
        for name in arrays
        if name not in active
    }
    x = {name: bridge.to_jax(name, fed[name].total) for name in active}
    c = {name: bridge.to_jax(name, item.total) for name, item in cotangents.items()}
    u = UNIT_ROUNDOFF[case.dtype]
    directions = (
        {name: bridge.to_jax(name, _directions(case, name, u * fed[name].magnitude)) for name in active},
        {name: bridge.to_jax(name, _directions(case, f"c {name}", u * i.magnitude)) for name, i in cotangents.items()},
    )
    (y, g, aux), (dy, dg) = _call(scheme, case, fixed, x, c, directions)
    outputs = {name: bridge.from_jax(f"output '{name}'", value) for name, value in {**y, **aux}.items()}
    for arg in scheme.outputs:
        if outputs[arg.name].shape != arg.shape(case):
            raise ReferenceFailure(
                f"reference returned {outputs[arg.name].shape} for '{arg.name}', '{arg.spec}' says {arg.shape(case)}"
            )
    return Reference(
        outputs,
        {name: bridge.from_jax(f"gradient of '{name}'", value) for name, value in g.items()},
        {name: _rms(value) for name, value in dy.items()},
        {name: _rms(value) for name, value in dg.items()},
    )


def _call(scheme: Scheme, case: CaseSpec, fixed: Any, x: Any, c: Any, directions: Any) -> Any:
    """The compiled function of this signature, timed on its first call."""
    options = {name: case.options[name] for name in scheme.options if name in case.options}
    shapes = tuple((name, a.shape, str(a.dtype)) for name, a in {**fixed, **x}.items())
    signature = (shapes, tuple(sorted((k, repr(v)) for k, v in options.items())))
    cache = _COMPILED.setdefault(scheme, {})
    if signature in cache:
        return cache[signature](fixed, x, c, directions)
    start = time.perf_counter()
    compiled = _build(scheme, options)
    try:
        result = compiled(fixed, x, c, directions)
    except TypeError as error:
        if str(error).startswith("bridge"):
            raise
        raise ReferenceFailure(f"reference {_shown(scheme)} raised TypeError: {_first_line(error)}") from error
    except ReferenceFailure:
        raise
    except Exception as error:
        raise ReferenceFailure(
            f"reference {_shown(scheme)} raised {type(error).__name__}: {_first_line(error)}"
        ) from error
    cache[signature] = compiled
    CLOCK.seconds += time.perf_counter() - start
    CLOCK.count += 1
    return result


def _build(scheme: Scheme, options: Mapping[str, Any]) -> Any:
    import jax

    names = [arg.name for arg in scheme.outputs]
    integer = {arg.name for arg in scheme.outputs if not arg.differentiable}

    def split(fixed: Any, x: Any) -> tuple[Any, Any]:
        returned = scheme.reference(**inputs.nested({**fixed, **x}), **options)
        parts = _named(scheme, names, returned)
        return {n: v for n, v in parts.items() if n not in integer}, {n: v for n, v in parts.items() if n in integer}

    def value_and_gradient(fixed: Any, x: Any, c: Any) -> tuple[Any, Any, Any]:
        y, pullback, aux = jax.vjp(lambda x: split(fixed, x), x, has_aux=True)
        return y, pullback(c)[0], aux

    def everything(fixed: Any, x: Any, c: Any, directions: Any) -> Any:
        def along(direction: Any) -> Any:
            return jax.jvp(lambda x, c: value_and_gradient(fixed, x, c)[:2], (x, c), direction)[1]

        return value_and_gradient(fixed, x, c), jax.vmap(along)(directions)

    return jax.jit(everything)


def _named(scheme: Scheme, names: list[str], returned: Any) -> dict[str, Any]:
    if scheme.output_form == "dict":
        if not isinstance(returned, dict) or sorted(returned) != sorted(names):
            raise ReferenceFailure(f"reference {_shown(scheme)} must return a dict with {sorted(names)}")
        parts = [returned[name] for name in names]
    else:
        parts = list(returned) if isinstance(returned, tuple | list) else [returned]
    if len(parts) != len(names):
        raise ReferenceFailure(f"reference {_shown(scheme)} returned {len(parts)} outputs, outputs has {len(names)}")
    for name, part in zip(names, parts, strict=True):
        _refuse_narrow(scheme, name, part)
    return dict(zip(names, parts, strict=True))


def _refuse_narrow(scheme: Scheme, name: str, part: Any) -> None:
    import jax
    import jax.numpy as jnp

    if not isinstance(part, jax.Array):
        kind = type(part).__name__
        raise ReferenceFailure(f"reference {_shown(scheme)} returned {kind} for '{name}'; return a JAX array")
    if jnp.issubdtype(part.dtype, jnp.floating) and part.dtype != jnp.float64:
        raise ReferenceFailure(
            f"reference {_shown(scheme)} returned {part.dtype} for '{name}' from float64 inputs; "
            "drop the cast, the reference states the mathematics in float64"
        )


def _directions(case: CaseSpec, name: str, step: np.ndarray) -> np.ndarray:
    signs = inputs.generator(case, f"direction {name}").integers(0, 2, size=(DIRECTIONS, *step.shape))
    return (2.0 * signs - 1.0) * step


def _rms(derivatives: Any) -> np.ndarray:
    array = np.nan_to_num(np.asarray(derivatives, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    scale = float(np.abs(array).max(initial=0.0)) or 1.0  # squares of large derivatives would overflow
    return scale * np.sqrt(np.mean((array / scale) ** 2, axis=0))


def _shown(scheme: Scheme) -> str:
    return getattr(scheme.reference, "__name__", type(scheme.reference).__name__)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
