"""The loss of an optimiser step: token losses, summed, over the count of tokens that have one.

loss = -sum_i log softmax(z_i)[target_i] / max(count, 1)    over the valid tokens i of all streams
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def token_losses(
    logits: Float[Array, "s v"], targets: Int[Array, " s"], is_valid: Bool[Array, " s"]
) -> Float[Array, " s"]:
    """-log p(target), 0 where it does not count."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=-1)[:, 0]
    return jnp.where(is_valid, -chosen, 0.0)


def normalised(losses: Sequence[Float[Array, " s"]], is_valid: Sequence[Bool[Array, " s"]]) -> Float[Array, ""]:
    """One number for all streams."""
    count = sum(each.sum() for each in is_valid)
    return sum(each.sum() for each in losses) / jnp.maximum(count, 1).astype(losses[0].dtype)
