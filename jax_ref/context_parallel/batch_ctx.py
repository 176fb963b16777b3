"""A dense batch padded on the right, as one device has it.

Ids are filled with 0, labels with -100; positions are columns; the mask is True for what was filled.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def padded_batch(
    x: Float[Array, "b s d"], ids: Int[Array, "b s"], labels: Int[Array, "b s"], real: int
) -> tuple[Float[Array, "b s d"], Int[Array, "b s"], Int[Array, "b s"], Int[Array, "b s"], Bool[Array, "b s"]]:
    """Embeddings, ids, labels, positions and padding mask, of which the first `real` columns were given."""
    column = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    padding = column >= real
    return (
        jnp.where(padding[..., None], 0.0, x),
        jnp.where(padding, 0, ids),
        jnp.where(padding, -100, labels),
        column,
        padding,
    )
