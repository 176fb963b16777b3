"""Watch a flax model: every module's input and output, with rounding errors on stored tensors.

A module's class is replaced by one whose call adds a probe of zeros to its input and output; the gradient of a probe is
the gradient of the tensor. A module's output gets its own rounding error, forward and backward; under bfloat16 so does
its input, because it is stored. If an output is a tuple, its first tensor counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.tracing.events import IN, OUT, Event

POOL, STRIDE = 8191, 1009  # both prime, so that no two arrays read the same draws
BITS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23), "float64": (11, 52)}  # exponent, mantissa


def draws(dtype: str, shape: tuple[int, ...], seed: int | Sequence[int]) -> np.ndarray:
    """Rounding errors for `with_errors`, in units of the dtype's roundoff.

    If sums run in the dtype itself, every product and every addend is rounded: one whole unit with a random sign stands
    for all of them. If sums run in float32, as for bfloat16, only stored tensors are rounded, uniformly within a unit.
    """
    generator = np.random.default_rng(seed)
    if is_summed_in(dtype):
        return 2.0 * generator.integers(0, 2, size=shape) - 1.0
    return generator.uniform(-1.0, 1.0, size=shape)


def is_summed_in(dtype: str) -> bool:
    """Whether sums of this dtype run in the dtype itself."""
    return UNIT_ROUNDOFF[dtype] <= UNIT_ROUNDOFF["float32"]


def with_errors(x: Any, unit: Any, errors: Any, dtype: str) -> Any:
    """x with rounding errors: relative to x if sums run in its dtype, else relative to the last place of x."""
    import jax
    import jax.numpy as jnp

    if is_summed_in(dtype):
        return x * (1.0 + unit * errors)
    mantissa = 2.0 * jnp.abs(jnp.frexp(jax.lax.stop_gradient(x))[0])  # 1 to 2, except for 0
    return x * (1.0 + unit * errors / jnp.maximum(mantissa, 1.0))


class Probes:
    """State while a loss is traced: probes by event or None, the tensors seen, and this copy's rounding errors.

    `errors` are POOL draws, `unit` is the roundoff, 0 for the copy that is not rounded.
    """

    def __init__(self, dtype: str, unit: Any, errors: Any, probes: Mapping[Event, Any] | None = None) -> None:
        self.dtype, self.unit, self.errors, self.probes = dtype, unit, errors, probes
        self.seen: dict[Event, Any] = {}
        self.calls: Counter[str] = Counter()
        self.rounded_count = 0

    def read(self, x: Any) -> Any:
        """A weight as the dtype stores it; with a rounding error for its products if the dtype rounds them."""
        import jax

        if is_summed_in(self.dtype):
            return self.rounded(x)
        rounded = jax.lax.reduce_precision(x, *BITS[self.dtype])
        return x + jax.lax.stop_gradient(rounded - x)

    def rounded(self, x: Any) -> Any:
        """Each number with its own error; every array reads a different place in the pool."""
        import jax.numpy as jnp

        self.rounded_count += 1
        start = self.rounded_count * STRIDE % (POOL // 2)
        errors = jnp.tile(self.errors[start:], -(-x.size // (POOL - start)))[: x.size]
        return with_errors(x, self.unit, errors.reshape(x.shape), self.dtype)

    def through(self, event: Event, x: Any) -> Any:
        """x with its probe, and with a rounding error at a module's output; in a narrow dtype also at its input."""
        x = self.rounded(x) if event.end == OUT or not is_summed_in(self.dtype) else x
        self.seen[event] = x
        return x if self.probes is None else x + self.probes[event]


def watch(model: Any, probes: Probes, is_whole: bool = False) -> None:
    """Replace the class of every callable module below the model; if `is_whole`, the model's too."""
    from flax import nnx

    for path, module in list(nnx.iter_modules(model)):
        name = ".".join(map(str, path))
        if (name or is_whole) and callable(module):
            _exchange(module, name, probes)


def _exchange(module: Any, name: str, probes: Probes) -> None:
    kind = type(module)

    def __call__(self: Any, *arguments: Any, **keywords: Any) -> Any:
        call = probes.calls[name]
        probes.calls[name] += 1
        if arguments and _is_floating(arguments[0]):
            arguments = (probes.through(Event(name, IN, call), arguments[0]), *arguments[1:])
        returned, event = kind.__call__(self, *arguments, **keywords), Event(name, OUT, call)
        if isinstance(returned, tuple) and returned and _is_floating(returned[0]):
            return probes.through(event, returned[0]), *returned[1:]
        return probes.through(event, returned) if _is_floating(returned) else returned

    metaclass: Any = type(kind)
    object.__setattr__(module, "__class__", metaclass(kind.__name__, (kind,), {"__call__": __call__}))


def _is_floating(x: Any) -> bool:
    import jax.numpy as jnp

    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
