"""Top-k distillation: log-probabilities of a student and a teacher at the teacher's k ids, but for the last position.

    student   log softmax of its logits at the ids, over the whole vocabulary or over those k alone
    teacher   log softmax over its own k logits
    entropy   h = sum_v p_v log p_v of the student's whole vocabulary

An id outside [0, V) is nobody's: the student's score is 0, without gradient, and it is no part of a sum over k. The
student may have more positions than the teacher, of which the last are padding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.entropy import negative_entropy
from jax_ref.vocab_parallel.gather_logprob import gather_logprob
from jax_ref.vocab_parallel.topk import logits_at


def distillation(
    student_logits: Float[Array, "b f v"],
    teacher_topk_logits: Float[Array, "b s k"],
    teacher_topk_indices: Int[Array, "b s k"],
    zero_outside_topk: bool,
    calculate_entropy: bool,
) -> tuple[Float[Array, "b u k"], Float[Array, "b u k"], Float[Array, "b u"] | None]:
    """(student, teacher, entropy or None)."""
    ids = teacher_topk_indices[:, :-1]
    z, teacher = student_logits[:, : ids.shape[1]], teacher_topk_logits[:, :-1]
    slots = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    if zero_outside_topk:
        student = gather_logprob(z, ids)
    else:
        known = (ids >= 0) & (ids < z.shape[-1])
        student = gather_logprob(jnp.where(known, logits_at(z, ids), -jnp.inf), jnp.where(known, slots, -1))
    return student, gather_logprob(teacher, slots), negative_entropy(z) if calculate_entropy else None
