"""Negative entropy of each row's softmax.

h = sum_v p_v log p_v,   0 log 0 = 0
"""

from jaxtyping import Array, Float

from jax_ref.vocab_parallel import statistics


def negative_entropy(logits: Float[Array, "*a v"]) -> Float[Array, "*a"]:
    """sum_v p_v log p_v, written as in statistics.py."""
    return statistics.negative_entropy(logits)
