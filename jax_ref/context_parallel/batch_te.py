"""A batch of rows that hold the same slots, as one device has it: the rows themselves, and their tables."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_ref.context_parallel.thd import tables


def packed_batch(
    x: Float[Array, "b t d"], labels: Int[Array, "b t"], padded: Int[Array, " q"], real: Int[Array, " q"]
) -> tuple[Float[Array, "b t d"], Int[Array, "b t"], Int[Array, "b t"], Bool[Array, "b t"]]:
    """Embeddings, labels, positions and padding mask."""
    positions, mask = (jnp.broadcast_to(table, labels.shape) for table in tables(labels.shape[1], padded, real))
    return x, labels, positions, mask
