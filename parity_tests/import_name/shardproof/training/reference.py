"""The same run on one device (flax, optax, float64, full batches), and its sensitivity to rounding.

Copies of the run advance together with it. In a copy, every weight that is read, every module's output, every gradient
and every new weight has a random rounding error of the tested dtype, drawn anew in every step (`tracing.probes.draws`).
The distance of the copies from the run shows how precisely a step's numbers are determined in that dtype (perturbation
of the reference, as in arXiv 2506.09280). In bfloat16 the run itself reads its weights rounded to bfloat16 too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardproof.judge import bridge
from shardproof.judge.reference import UNIT_ROUNDOFF, evaluated
from shardproof.tracing.flax_side import parted
from shardproof.tracing.probes import POOL, Probes, draws, watch, with_errors
from shardproof.training.corpus import global_batch
from shardproof.training.initial import initial_weights
from shardproof.training.precision import STORED_DTYPE
from shardproof.training.record import Step
from shardproof.training.reference_optimizer import reference_optimizer
from shardproof.training.run import Run

# In bfloat16 more copies, to sample a rare event: AdamW reverses a step.
COPIES = {"float64": 4, "float32": 4, "bfloat16": 16}


@dataclass(frozen=True)
class ReferenceStep:
    """A step of the reference, and the spread of each of its numbers over the copies.

    A spread is relative and a ratio of norms: the root mean square over the copies of their distance from the run.
    """

    step: Step
    spread: dict[str, float]


def steps(run: Run) -> Iterator[ReferenceStep]:
    """Yield the steps of a run without end, from its initial weights on, even if the run was resumed."""
    bridge.start()
    advance, weights, state = _all_copies(run)
    for index in itertools.count():
        batch = global_batch(run, index)
        ids, padded, real = (np.stack([getattr(x, name) for x in batch]) for name in ("ids", "padded", "real"))
        loss, gradients, weights, state = advance(weights, state, _errors(run, index, weights), ids, padded, real)
        yield _reference_step(index, np.asarray(loss), _arrays(gradients), _arrays(weights))


def _all_copies(run: Run) -> tuple[Any, Any, Any]:
    """One step of all copies together, their initial weights and optimiser states. Copy 0 is the run itself."""
    import jax

    from jax_ref.models import Config, step_loss
    from shardproof.training.by_name import flax_model

    config, (initial_state, optimizer_step) = Config(**run.config), reference_optimizer(run)
    dtype = STORED_DTYPE[run.dtype]
    units = np.array([0.0] + [UNIT_ROUNDOFF[run.dtype]] * COPIES[run.dtype])

    def advance(weights: Any, state: Any, unit: Any, errors: Any, ids: Any, padded: Any, real: Any) -> Any:
        def loss(parameters: Any) -> Any:
            through = Probes(run.dtype, unit, errors["passing"])
            model = flax_model(config, {name: through.read(x) for name, x in parameters.items()})
            watch(model, through)
            return step_loss(model, ids, padded, real)

        value, gradients = jax.value_and_grad(loss)(weights)
        gradients = _off(gradients, unit, errors["back"], run.dtype)
        new, state = optimizer_step(gradients, state, weights)
        unit_of_weights = unit * (UNIT_ROUNDOFF[dtype] / UNIT_ROUNDOFF[run.dtype])
        return value, gradients, _off(new, unit_of_weights, errors["writing"], dtype), state

    advance_all = evaluated(jax.vmap(advance, (0, 0, 0, 0, None, None, None)))
    first = initial_weights(run.config, run.seed)
    copies = {name: np.broadcast_to(x, (len(units), *x.shape)) for name, x in first.items()}
    state = evaluated(jax.vmap(initial_state))(copies)
    return lambda weights, state, *rest: advance_all(weights, state, units, *rest), copies, state


def _errors(run: Run, index: int, weights: Any) -> dict[str, Any]:
    """Each copy's rounding errors in one step: of tensors in the model, of gradients, and of new weights."""
    seeds = ([run.seed, index, count] for count in itertools.count())
    stored = STORED_DTYPE[run.dtype]
    return {
        "passing": draws(run.dtype, (COPIES[run.dtype] + 1, POOL), next(seeds)),
        "back": {name: draws(run.dtype, x.shape, next(seeds)) for name, x in weights.items()},
        "writing": {name: draws(stored, x.shape, next(seeds)) for name, x in weights.items()},
    }


def _off(tree: dict[str, Any], unit: Any, errors: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Add a different rounding error to each number."""
    return {name: with_errors(x, unit, errors[name], dtype) for name, x in tree.items()}


def _arrays(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in tree.items()}


def _reference_step(
    index: int, loss: np.ndarray, gradients: dict[str, np.ndarray], weights: dict[str, np.ndarray]
) -> ReferenceStep:
    norms = np.sqrt(sum((x.reshape(len(loss), -1) ** 2).sum(1) for x in gradients.values()))
    spread = {"loss": parted(loss[:, None]), "norm": parted(norms[:, None])}
    spread |= {f"gradient/{name}": parted(x) for name, x in gradients.items()}
    spread |= {f"weight/{name}": parted(x) for name, x in weights.items()}
    first = {name: x[0] for name, x in gradients.items()}, {name: x[0] for name, x in weights.items()}
    return ReferenceStep(Step(index, float(loss[0]), float(norms[0]), *first), spread)
