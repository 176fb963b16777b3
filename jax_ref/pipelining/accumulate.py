"""A model without stages, one micro-batch after the other: losses, and gradients added up in an order and divided once.

    g = (1/d) sum_k grad loss(parameters, microbatch[order[k]])

Micro-batches may have different lengths.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def accumulate(
    loss: Callable[..., jax.Array],
    parameters: Any,
    microbatches: Sequence[tuple[jax.Array, ...]],
    order: Sequence[int] | None = None,
    divisor: int = 1,
) -> tuple[list[jax.Array], Any]:
    """Losses of the micro-batches as they are numbered, and the gradient."""
    order = range(len(microbatches)) if order is None else order
    found = {m: jax.value_and_grad(loss)(parameters, *microbatches[m]) for m in order}
    total = found[order[0]][1]
    for m in order[1:]:
        total = jax.tree.map(lambda sum_so_far, gradient: sum_so_far + gradient, total, found[m][1])
    mean = jax.tree.map(lambda x: x / divisor, total)
    return [found[m][0] for m in range(len(microbatches))], mean
