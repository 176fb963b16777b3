"""Trace a flax model: every module's input and output and their gradients, and how far rounding moves each.

A module's class is exchanged for one whose call adds a probe, which is zero, to what enters and what leaves; the
gradient of a probe is the gradient of the tensor. In the copies every weight and every tensor that leaves a module is
off by half a unit in the last place of the tested dtype, with random signs (perturbation as in arXiv 2506.09280).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity_tests.harness import bridge
from parity_tests.harness.oracle import UNIT_ROUNDOFF, compiler_options
from parity_tests.tracing.events import IN, OUT, Event

COPIES = 4
POOL, STRIDE = 8191, 1009  # both prime, so that no two arrays read the same signs
Made = Callable[[Any], Any]  # from a tree of weights to a flax module
Called = Callable[[Any], Any]  # from that module to the loss


@dataclass(frozen=True)
class Known:
    """Whole arrays by event and by weight, and for each the root mean square distance of its copies, relative."""

    values: dict[Event, np.ndarray]
    gradients: dict[Event, np.ndarray]
    of_weights: dict[str, np.ndarray]
    spread: dict[tuple[str, Event | str], float]


class _Probes:
    """While a loss is traced: probes by event, what was seen, and the signs of this copy's roundings."""

    def __init__(self, probes: Mapping[Event, Any] | None, unit: Any, signs: Any) -> None:
        self.probes, self.unit, self.signs = probes, unit, signs
        self.seen: dict[Event, Any] = {}
        self.calls: Counter[str] = Counter()
        self.rounded_count = 0

    def rounded(self, x: Any) -> Any:
        """Each number times 1 + unit or 1 - unit; every array reads the pool of signs from another place."""
        import jax.numpy as jnp

        self.rounded_count += 1
        start = self.rounded_count * STRIDE % (POOL // 2)
        signs = jnp.tile(self.signs[start:], -(-x.size // (POOL - start)))[: x.size]
        return x * (1.0 + self.unit * signs.reshape(x.shape))

    def through(self, event: Event, x: Any) -> Any:
        """x with its probe; what leaves a module also with its rounding."""
        x = self.rounded(x) if event.end == OUT else x
        self.seen[event] = x
        return x if self.probes is None else x + self.probes[event]


def traced(make: Made, call: Called, weights: Mapping[str, np.ndarray], dtype: str, seed: int = 0) -> Known:
    """Everything about one loss, `call(make(weights))`, on whole float64 arrays."""
    jax = bridge.start()
    import jax.numpy as jnp

    held = {name: bridge.to_jax(name, np.asarray(array, np.float64)) for name, array in weights.items()}
    units = jnp.array([0.0] + [UNIT_ROUNDOFF[dtype]] * COPIES)
    signs = jnp.asarray(2.0 * np.random.default_rng(seed).integers(0, 2, size=(len(units), POOL)) - 1.0)
    order: list[Event] = []

    def loss(weights: Any, probes: Any, unit: Any, signs: Any) -> Any:
        through = _Probes(probes, unit, signs)
        model = make({name: through.rounded(x) for name, x in weights.items()})
        watch(model, through)
        value = call(model)
        order[:] = through.seen
        return value, through.seen

    _, shapes = jax.eval_shape(lambda: loss(held, None, units[0], signs[0]))
    probes = {event: jnp.zeros(shape.shape, shape.dtype) for event, shape in shapes.items()}

    def everything(unit: Any, signs: Any) -> Any:
        gradients, seen = jax.grad(loss, (0, 1), has_aux=True)(held, probes, unit, signs)
        return {"value": seen, "gradient": gradients[1], "weight": gradients[0]}

    found = jax.jit(jax.vmap(everything), compiler_options=compiler_options())(units, signs)
    arrays = {kind: {at: bridge.from_jax(str(at), x) for at, x in tree.items()} for kind, tree in found.items()}
    spread = {(kind, at): _spread(x) for kind, tree in arrays.items() for at, x in tree.items()}
    first = {kind: {at: x[0] for at, x in tree.items()} for kind, tree in arrays.items()}
    return Known({event: first["value"][event] for event in order}, first["gradient"], first["weight"], spread)


def watch(model: Any, probes: _Probes) -> None:
    """Exchange the class of every callable module below the model."""
    from flax import nnx

    for path, module in list(nnx.iter_modules(model)):
        name = ".".join(map(str, path))
        if name and callable(module):
            _exchange(module, name, probes)


def _exchange(module: Any, name: str, probes: _Probes) -> None:
    kind = type(module)

    def __call__(self: Any, *given: Any, **further: Any) -> Any:
        call = probes.calls[name]
        probes.calls[name] += 1
        if given and _is_floating(given[0]):
            given = (probes.through(Event(name, IN, call), given[0]), *given[1:])
        returned = kind.__call__(self, *given, **further)
        return probes.through(Event(name, OUT, call), returned) if _is_floating(returned) else returned

    metaclass: Any = type(kind)
    object.__setattr__(module, "__class__", metaclass(kind.__name__, (kind,), {"__call__": __call__}))


def _is_floating(x: Any) -> bool:
    import jax.numpy as jnp

    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _spread(copies: np.ndarray) -> float:
    flat = copies.reshape(len(copies), -1)
    distance = np.sqrt((((flat[1:] - flat[0]) ** 2).sum(1)).mean())
    return float(distance / max(np.linalg.norm(flat[0]), np.finfo(np.float64).tiny))
