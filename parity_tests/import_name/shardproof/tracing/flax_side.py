"""Trace a flax model: every module's input, output and their gradients, and how far rounding moves each.

In the copies every weight and every tensor that leaves a module has a rounding error of the tested dtype (perturbation
as in arXiv 2506.09280; see `probes.draws`). The model itself reads its weights rounded to that dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardproof.judge import bridge
from shardproof.judge.reference import UNIT_ROUNDOFF, evaluated
from shardproof.tracing.events import LOSS, NORM, Event
from shardproof.tracing.probes import POOL, Probes, draws, watch

COPIES = 4
Made = Callable[[Any], Any]  # from a pytree of weights to a flax module
Called = Callable[[Any], Any]  # from that module to the loss


@dataclass(frozen=True)
class ReferenceTrace:
    """Full arrays by event and by weight, and for each the relative root mean square distance of its copies.

    `numbers` are the loss and the gradient norm, under the names in `events`.
    """

    values: dict[Event, np.ndarray]
    gradients: dict[Event, np.ndarray]
    of_weights: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]
    spread: dict[tuple[str, Event | str], float]


def traced(
    make: Made,
    call: Called,
    weights: Mapping[str, np.ndarray],
    dtype: str,
    seed: int = 0,
    *,
    is_whole: bool = False,
) -> ReferenceTrace:
    """Everything about one loss, `call(make(weights))`, on whole float64 arrays.

    If `is_whole`, it includes the input and output of the model itself, named "".
    """
    jax = bridge.start()
    import jax.numpy as jnp

    parameters = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    units = np.array([0.0] + [UNIT_ROUNDOFF[dtype]] * COPIES)
    errors = draws(dtype, (len(units), POOL), seed)
    order: list[Event] = []

    def loss(weights: Any, probes: Any, unit: Any, errors: Any) -> Any:
        through = Probes(dtype, unit, errors, probes)
        model = make({name: through.read(x) for name, x in weights.items()})
        watch(model, through, is_whole)
        value = call(model)
        order[:] = through.seen
        return value, (through.seen, value)

    _, (shapes, _) = jax.eval_shape(lambda *copy: loss(parameters, None, *copy), units[0], errors[0])
    probes = {event: np.zeros(shape.shape, shape.dtype) for event, shape in shapes.items()}

    def everything(unit: Any, errors: Any) -> Any:
        gradients, (seen, value) = jax.grad(loss, (0, 1), has_aux=True)(parameters, probes, unit, errors)
        norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(gradients[0])))
        numbers = {LOSS: value, NORM: norm}
        return {"value": seen, "gradient": gradients[1], "weight": gradients[0], "number": numbers}

    derivatives = evaluated(jax.vmap(everything))(units, errors)
    arrays = {kind: {at: np.asarray(x) for at, x in tree.items()} for kind, tree in derivatives.items()}
    spread = {(kind, at): parted(x) for kind, tree in arrays.items() for at, x in tree.items()}
    first = {kind: {at: x[0] for at, x in tree.items()} for kind, tree in arrays.items()}
    values = {event: first["value"][event] for event in order}
    return ReferenceTrace(values, first["gradient"], first["weight"], first["number"], spread)


def parted(copies: np.ndarray) -> float:
    """Root mean square distance from the first, relative to its norm.

    Skips elements that are not finite in the first.
    """
    flat = copies.reshape(len(copies), -1)
    flat = flat[:, np.isfinite(flat[0])]
    distance = np.sqrt((((flat[1:] - flat[0]) ** 2).sum(1)).mean())
    return float(distance / max(np.linalg.norm(flat[0]), np.finfo(np.float64).tiny))
