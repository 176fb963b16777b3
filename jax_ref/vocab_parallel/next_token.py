"""Log-probability of the next token of a sequence.

    out[b, t] = log p(id[b, t + 1] | z[b, t]),   t < s - 1

p is the distribution that a sampler draws from. Positions of z past the ids are padding.
"""

from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.sampling import sampled_logprob


def next_token_logprob(
    logits: Float[Array, "b l v"],
    target: Int[Array, "b s"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Float[Array, "b u"]:
    """log p of id t + 1 at position t."""
    scored = logits[:, : max(target.shape[1] - 1, 0)]
    return sampled_logprob(scored, target[:, 1:], top_k, top_p, temperature)
