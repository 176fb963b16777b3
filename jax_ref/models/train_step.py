"""One optimiser step on whole streams: the loss of all, its gradient, AdamW.

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    w <- w - rate * (m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps) + decay * w)       in step k

Source: arXiv 1711.05101 (AdamW).
"""

import jax
import optax
from jaxtyping import Array, Float, Int

from jax_ref.models.batch import next_ids
from jax_ref.models.hybrid import HybridLM
from jax_ref.models.loss import normalised, token_losses


def step_loss(
    model: HybridLM, ids: Int[Array, "i t"], padded: Int[Array, "i n"], real: Int[Array, "i n"]
) -> Float[Array, ""]:
    """The loss of i streams, row j of the offsets being stream j's."""

    def of_stream(ids: Array, padded: Array, real: Array) -> tuple[Array, Array]:
        targets, is_valid = next_ids(ids, padded, real)
        return token_losses(model(ids[None], padded, real)[0], targets, is_valid), is_valid

    losses, is_valid = jax.vmap(of_stream)(ids, padded, real)
    return normalised(list(losses), list(is_valid))


def adamw(rate: float, decay: float) -> optax.GradientTransformation:
    """The optimiser."""
    return optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=decay)
