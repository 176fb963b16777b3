"""The optimizer step on one device: clipping, then optax AdamW, or Muon for matrices and AdamW for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardproof.training.fused import has_halves
from shardproof.training.run import Run

OF_ADAMW = ("embed_tokens.weight", "lm_head.weight")


def reference_optimizer(run: Run) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two functions: weights -> state, and (gradients, state, weights) -> (new weights, new state)."""
    import jax
    import jax.numpy as jnp

    from jax_ref.models import adamw
    from jax_ref.optimizers import clipped, muon

    optimizer = adamw(run.learning_rate, run.weight_decay)

    def uses_muon(name: str, shape: tuple[int, ...]) -> bool:
        return run.optimizer == "muon" and name not in OF_ADAMW and len(shape) > 1 and min(shape[-2:]) > 1

    def initial(weights: Any) -> Any:
        buffers = {name: jnp.zeros_like(x) for name, x in weights.items() if uses_muon(name, x.shape)}
        return optimizer.init({name: x for name, x in weights.items() if name not in buffers}), buffers

    def step(gradients: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        if run.clip is not None:
            gradients = clipped(gradients, run.clip, 2.0)[1]
        of_adamw, buffers = state
        other_weights = {name: x for name, x in weights.items() if name not in buffers}
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
            updates, of_adamw = optimizer.update(
                {name: gradients[name] for name in other_weights}, of_adamw, other_weights
            )
        settings: dict[str, Any] = {"lr": run.learning_rate, "weight_decay": run.weight_decay}
        matrices = {
            name: muon(weights[name], gradients[name], x, rows=_rows(name, x), **settings)
            for name, x in buffers.items()
        }
        new = jax.tree.map(jnp.add, other_weights, updates) | {name: after for name, (after, _) in matrices.items()}
        return {name: new[name] for name in weights}, (of_adamw, {name: x for name, (_, x) in matrices.items()})

    return initial, step


def _rows(name: str, x: Any) -> tuple[int, int] | None:
    """The numbers of rows of the two matrices in a fused stack; None for a single matrix."""
    return (x.shape[-2] // 2,) * 2 if has_halves(name) else None
