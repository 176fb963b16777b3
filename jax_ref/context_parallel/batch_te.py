"""A batch of rows that hold the same slots, as one device has it: the rows themselves, and their tables."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_ref.context_parallel.thd import tables

ByToken = Int[Array, "b t"]
Lengths = Int[Array, "b q"]


def packed_batch(
    x: Float[Array, "b t d"], labels: ByToken, padded: Int[Array, " q"], real: Int[Array, " q"]
) -> tuple[Float[Array, "b t d"], ByToken, ByToken, Bool[Array, "b t"], Lengths, Lengths]:
    """Embeddings, labels, positions, padding mask, and the lengths of each row, real and padded."""
    positions, mask = (jnp.broadcast_to(table, labels.shape) for table in tables(labels.shape[1], padded, real))
    real_lengths, slots = (jnp.broadcast_to(each, (len(labels), len(each))) for each in (real, padded))
    return x, labels, positions, mask, real_lengths, slots
