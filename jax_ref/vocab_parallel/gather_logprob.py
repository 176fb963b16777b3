"""Log-probabilities of k ids of each row: the same target formula, id by id."""

from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.logprob import logprob


def gather_logprob(logits: Float[Array, "*a v"], ids: Int[Array, "*a k"]) -> Float[Array, "*a k"]:
    """log p[ids[j]]; an id outside [0, V) is nobody's: 0 without gradient."""
    rows = logits[..., None, :].repeat(ids.shape[-1], axis=-2)
    return logprob(rows, ids)
