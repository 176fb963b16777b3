"""The place where a function stores an intermediate in the dtype of its tensors."""

import jax
from jaxtyping import Array, Float

EXPONENT_BITS, MANTISSA_BITS = 11, 52  # of float64, so that no number changes


def stored(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Mark x, and its gradient, as stored in the dtype of the function's tensors; returns x.

    The mathematics is the identity. Where a scheme promises `sums="float32"` and a 16-bit dtype is tested, the
    verification rounds x and its gradient here, and nothing else before the results.
    Inside a loop or a branch of JAX (`lax.scan`, `lax.cond`) it is rejected.
    """
    return jax.lax.reduce_precision(x, EXPONENT_BITS, MANTISSA_BITS)
