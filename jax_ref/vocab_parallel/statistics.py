"""What a row of logits has to itself: its log-probabilities, its normaliser and its negative entropy.

    d_v = z_v - m,   m = z_a,   a = argmax_v z_v,   R = sum_{v != a} exp(d_v)
    log p_v = d_v - log(1 + R)
    lse = log sum_v exp(z_v) = m + log(1 + R)
    h = sum_v p_v log p_v = sum_v p_v d_v - log(1 + R),   0 log 0 = 0

The largest term of the sum is 1 and is kept out of R, so that a row that is all but certain keeps its digits.
A column of -inf is masked: p = 0. A row that is -inf throughout has no softmax and gives NaN.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def log_probabilities(logits: Float[Array, "*a v"], temperature: float = 1.0) -> Float[Array, "*a v"]:
    """log p of z / temperature. The difference d comes first: it is exact where a quotient is not."""
    below, rest = _below_and_rest(logits, temperature)
    return below - jnp.log1p(rest)[..., None]


def normaliser(logits: Float[Array, "*a v"]) -> tuple[Float[Array, "*a"], Float[Array, "*a"]]:
    """(m, log(1 + R)), whose sum is lse = log sum_v exp(z_v)."""
    _, rest = _below_and_rest(logits, 1.0)
    return logits.max(-1), jnp.log1p(rest)


def negative_entropy(logits: Float[Array, "*a v"], temperature: float = 1.0) -> Float[Array, "*a"]:
    """h = sum_v p_v d_v - log(1 + R) of z / temperature."""
    below, rest = _below_and_rest(logits, temperature)
    masked = below == -jnp.inf
    finite = jnp.where(masked, 0, below)  # chosen before exp, so that no gradient meets 0 * inf
    terms = jnp.where(masked, 0, jnp.exp(finite))
    return (terms * finite).sum(-1) / (1 + rest) - jnp.log1p(rest)


def _below_and_rest(
    logits: Float[Array, "*a v"], temperature: float
) -> tuple[Float[Array, "*a v"], Float[Array, "*a"]]:
    """(d, R)."""
    a = logits.argmax(-1)
    is_largest = jax.nn.one_hot(a, logits.shape[-1], dtype=bool)
    below = (logits - jnp.take_along_axis(logits, a[..., None], axis=-1)) / temperature
    below = jnp.where(is_largest, lax.stop_gradient(below), below)  # z_a - z_a: nothing moves it
    return below, jnp.where(is_largest, 0, jnp.exp(below)).sum(-1)
