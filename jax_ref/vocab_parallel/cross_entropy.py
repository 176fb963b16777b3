"""Cross entropy of a student's distribution q under a target distribution p.

    H = -sum_v p_v log q_v,   p = softmax(target_logits),   q = softmax(student_logits)

A column that the target masks (-inf) adds nothing, whatever the student has there; one that the student alone masks
makes H +inf, also where p_v is too small for a float.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_ref.vocab_parallel.statistics import log_probabilities


def cross_entropy(student_logits: Float[Array, "*a v"], target_logits: Float[Array, "*a v"]) -> Float[Array, "*a"]:
    """H(p, q)."""
    surprise = jnp.where(target_logits == -jnp.inf, 0, -log_probabilities(student_logits))
    p = jnp.exp(log_probabilities(target_logits))
    some_p = jnp.where(surprise == jnp.inf, jnp.maximum(p, jnp.finfo(p.dtype).tiny), p)
    return (some_p * surprise).sum(-1)
