"""Softmax over a full vocabulary and functions of it: one device, full rows, plain formulas.

    z   logits [..., v]        t   a target id        T   a temperature, y = z / T

1. per row: log-probabilities, negative entropy
2. softmax, log-softmax, cross entropy
3. the log-probability of a target, or of several ids
4. a sampler's distribution: top-k, top-p, min-p
5. next tokens: in a sequence, in stored order, in packed sequences
6. the k largest logits, logits at ids, top-k distillation
7. log-probabilities from hidden states

An id outside [0, v) has score 0 and no gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

# 1. Per row: log-probabilities, negative entropy.
#
#     m = z_a,   a = argmax_v z_v,   b_v = (z_v - m) / T,   R = sum_{v != a} exp(b_v)
#     log p_v = b_v - log(1 + R)
#     lse = log sum_v exp(z_v) = m + log(1 + R),   for T = 1
#     h = sum_v p_v log p_v = sum_v p_v b_v - log(1 + R),   0 log 0 = 0
#
# Names: b shifted, the shifted logits; R row_sum_m1, the row's sum minus 1. R leaves out the largest term, which is 1,
# so that R keeps its digits if p of the largest logit is almost 1.
# A column of -inf is masked: p = 0. A row of only -inf has no softmax and gives NaN.


def log_probabilities(logits: Float[Array, "*a v"], temperature: float = 1.0) -> Float[Array, "*a v"]:
    """log p of z / T. The difference z - m comes before the division, which would round z and m."""
    shifted, row_sum_m1 = _shifted_and_row_sum_m1(logits, temperature)
    return shifted - jnp.log1p(row_sum_m1)[..., None]


def negative_entropy(logits: Float[Array, "*a v"], temperature: float = 1.0) -> Float[Array, "*a"]:
    """h = sum_v p_v log p_v = sum_v p_v b_v - log(1 + R) of z / T,   0 log 0 = 0."""
    shifted, row_sum_m1 = _shifted_and_row_sum_m1(logits, temperature)
    masked = shifted == -jnp.inf
    finite = jnp.where(masked, 0, shifted)  # selected before exp, to keep 0 * inf out of the gradient
    terms = jnp.where(masked, 0, jnp.exp(finite))
    return (terms * finite).sum(-1) / (1 + row_sum_m1) - jnp.log1p(row_sum_m1)


def _shifted_and_row_sum_m1(
    logits: Float[Array, "*a v"], temperature: float
) -> tuple[Float[Array, "*a v"], Float[Array, "*a"]]:
    """(b, R)."""
    a = logits.argmax(-1)
    is_largest = jax.nn.one_hot(a, logits.shape[-1], dtype=bool)
    shifted = (logits - jnp.take_along_axis(logits, a[..., None], axis=-1)) / temperature
    shifted = jnp.where(is_largest, lax.stop_gradient(shifted), shifted)  # z_a - z_a is constant
    return shifted, jnp.where(is_largest, 0, jnp.exp(shifted)).sum(-1)


# 2. Softmax and cross entropy.


def log_softmax(logits: Float[Array, "*a v"]) -> Float[Array, "*a v"]:
    """log p_v."""
    return log_probabilities(logits)


def softmax(logits: Float[Array, "*a v"]) -> Float[Array, "*a v"]:
    """p_v."""
    return jnp.exp(log_probabilities(logits))


def cross_entropy(student_logits: Float[Array, "*a v"], target_logits: Float[Array, "*a v"]) -> Float[Array, "*a"]:
    """H(p, q) = -sum_v p_v log q_v,   p = softmax(target_logits),   q = softmax(student_logits).

    A column masked (-inf) in the target adds nothing, for any student. A column masked in the student alone makes H
    +inf, even if p_v underflows.
    """
    surprise = jnp.where(target_logits == -jnp.inf, 0, -log_probabilities(student_logits))
    p = jnp.exp(log_probabilities(target_logits))
    some_p = jnp.where(surprise == jnp.inf, jnp.maximum(p, jnp.finfo(p.dtype).tiny), p)
    return (some_p * surprise).sum(-1)


def kl_divergence(
    student_logits: Float[Array, "*a v"],
    teacher_logits: Float[Array, "*a v"],
    reverse: bool = False,
    temperature: float = 1.0,
) -> Float[Array, "*a"]:
    """KL(a || b) = sum_v a_v (log a_v - log b_v): a is the teacher and b the student; with `reverse` the other way.

    As in the cross entropy, a column masked in a adds nothing, and a column masked in b alone makes the result +inf.
    """
    a, b = (student_logits, teacher_logits) if reverse else (teacher_logits, student_logits)
    log_a, log_b = log_probabilities(a, temperature), log_probabilities(b, temperature)
    gap = jnp.where(a == -jnp.inf, 0, jnp.where(a == -jnp.inf, 0, log_a) - jnp.where(a == -jnp.inf, 0, log_b))
    weight = jnp.exp(log_a)
    some_weight = jnp.where(gap == jnp.inf, jnp.maximum(weight, jnp.finfo(weight.dtype).tiny), weight)
    return (some_weight * gap).sum(-1)


# 3. The log-probability of a target.


def logprob(logits: Float[Array, "*a v"], target: Int[Array, "*a"], temperature: float = 1.0) -> Float[Array, "*a"]:
    """log p[t].

    log p[t] = -log(1 + sum_{v != t} exp(y_v - y_t))                   if y_t is the largest
    log p[t] = (y_t - m) - log(sum_v exp(y_v - m)),   m = max_v y_v    otherwise

    The two formulas are equal; the first keeps all digits of a probability near 1, in value and gradient.
    """
    in_vocabulary = (target >= 0) & (target < logits.shape[-1])
    rows = jnp.where(in_vocabulary[..., None], logits, 0)  # before the softmax, so that other rows get no gradient
    shifted = (rows - lax.stop_gradient(rows.max(-1, keepdims=True))) / temperature
    is_target = jax.nn.one_hot(target, logits.shape[-1], dtype=bool)
    other_terms = jnp.where(is_target, 0, jnp.exp(shifted)).sum(-1)  # the sum over v != t
    at_target = jnp.where(is_target, shifted, 0).sum(-1)
    is_largest = at_target == 0
    if_largest = -jnp.log1p(other_terms * jnp.exp(-jnp.where(is_largest, at_target, 0)))
    if_smaller = at_target - jnp.log(other_terms + jnp.exp(at_target))
    return jnp.where(in_vocabulary, jnp.where(is_largest, if_largest, if_smaller), 0)


def logprob_and_negative_entropy(
    logits: Float[Array, "*a v"], target: Int[Array, "*a"], temperature: float = 1.0
) -> tuple[Float[Array, "*a"], Float[Array, "*a"]]:
    """(log p[t], sum_v p_v log p_v)."""
    return logprob(logits, target, temperature), negative_entropy(logits, temperature)


def gather_logprob(logits: Float[Array, "*a v"], ids: Int[Array, "*a k"]) -> Float[Array, "*a k"]:
    """log p[ids[j]] for each of k ids, by the formula for one target."""
    rows = logits[..., None, :].repeat(ids.shape[-1], axis=-2)
    return logprob(rows, ids)


# 4. A sampler's distribution.


def sampling_mask(
    logits: Float[Array, "*a v"],
    top_k: int | None,
    top_p: float | None,
    temperature: float = 1.0,
    min_p: float | None = None,
) -> Bool[Array, "*a v"]:
    """Mask of the columns that pass top-k and min-p, then top-p.

    A filter is off at None, and at a top_k below 1, a top_p of 1 or a min_p of 0.

    top-k:  z_v >= the k-th largest of the row, with all ties
    min-p:  p_v >= min_p max_u p_u, that is (z_v - m) / T >= log min_p
    top-p:  sort the remaining columns (z descending, id ascending); keep the first, and every column with
            sum_before exp((z - m) / T) < p sum_all exp((z - m) / T),   m = max_v z_v
    """
    is_kept = jnp.ones(logits.shape, bool)
    if top_k is not None and 0 < top_k < logits.shape[-1]:
        is_kept = logits >= jnp.sort(logits, axis=-1)[..., -top_k, None]
    if min_p is not None and min_p > 0:
        is_kept &= (logits - logits.max(-1, keepdims=True)) / temperature >= jnp.log(min_p)
    if top_p is not None and top_p < 1:
        order = jnp.argsort(-logits, axis=-1, stable=True)
        in_order = jnp.take_along_axis(jnp.where(is_kept, logits, -jnp.inf), order, axis=-1)
        mass = jnp.exp((in_order - in_order[..., :1]) / temperature)
        upto = jnp.cumsum(mass, axis=-1)
        before = jnp.concatenate([jnp.zeros_like(upto[..., :1]), upto[..., :-1]], axis=-1)
        early = (before < top_p * upto[..., -1:]).at[..., 0].set(True)
        is_kept &= jnp.take_along_axis(early, jnp.argsort(order, axis=-1), axis=-1)
    return is_kept


def sampled_logprob(
    logits: Float[Array, "*a v"],
    target: Int[Array, "*a"],
    top_k: int | None,
    top_p: float | None,
    temperature: float = 1.0,
    min_p: float | None = None,
) -> Float[Array, "*a"]:
    """log p[t] = y_t - log sum_{v kept} exp(y_v); -inf if t is filtered.

    The mask is a constant and has no gradient.
    """
    is_kept = sampling_mask(lax.stop_gradient(logits), top_k, top_p, temperature, min_p)
    return logprob(jnp.where(is_kept, logits, -jnp.inf), target, temperature)


# 5. Next tokens.


def next_token_logprob(
    logits: Float[Array, "b l v"],
    target: Int[Array, "b s"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float | None = None,
) -> Float[Array, "b u"]:
    """out[b, j] = log p(id[b, j + 1] | z[b, j]),   j < s - 1. Positions of z beyond the ids are padding."""
    scored = logits[:, : max(target.shape[1] - 1, 0)]
    return sampled_logprob(scored, target[:, 1:], top_k, top_p, temperature, min_p)


def next_token_logprob_of_stored(
    logits: Float[Array, "b s v"], target: Int[Array, "b s"], seq_index: Int[Array, " s"], temperature: float = 1.0
) -> Float[Array, "b u"]:
    """`next_token_logprob` in original order; stored position j is original position seq_index[j]."""
    original = jnp.argsort(seq_index)
    return next_token_logprob(logits[:, original], target[:, original], temperature)


def packed_next_token_logprob(
    logits: Float[Array, "1 t v"],
    target: Int[Array, "1 t"],
    starts: Int[Array, " b"],
    lengths: Int[Array, " b"],
    unpacked_seqlen: int,
    temperature: float = 1.0,
) -> Float[Array, "b u"]:
    """out[i, j] = log p(id[c_i + j + 1] | z[c_i + j])   for j + 1 < the length of sequence i, else 0.

    Sequence i has `lengths[i]` tokens, starts at c_i = `starts[i]`, and is scored separately.
    """
    j = jnp.arange(unpacked_seqlen - 1)
    rows = []
    for i in range(len(starts)):
        has_next = j + 1 < lengths[i]
        token = jnp.where(has_next, starts[i] + j, 0)
        row = logprob(logits[0, token], jnp.where(has_next, target[0, token + 1], -1), temperature)
        rows.append(row)
    return jnp.stack(rows)


def packed_next_token_negative_entropy(
    logits: Float[Array, "1 t v"],
    starts: Int[Array, " b"],
    lengths: Int[Array, " b"],
    unpacked_seqlen: int,
    temperature: float = 1.0,
) -> Float[Array, "b u"]:
    """out[i, j] = h of z[c_i + j]   for j + 1 < the length of sequence i, else 0."""
    j = jnp.arange(unpacked_seqlen - 1)
    rows = []
    for i in range(len(starts)):
        has_next = j + 1 < lengths[i]
        scored = jnp.where(has_next[:, None], logits[0, jnp.where(has_next, starts[i] + j, 0)], 0)
        rows.append(jnp.where(has_next, negative_entropy(scored, temperature), 0))
    return jnp.stack(rows)


def sequence(x: Shaped[Array, "*a"]) -> Shaped[Array, "*a"]:
    """A sequence that ranks shard and gather again: on one device, the sequence itself."""
    return x


def next_positions(x: Shaped[Array, "b s *d"], fill: float = 0) -> Shaped[Array, "b s *d"]:
    """x shifted by one position: out[:, j] = x[:, j + 1], and `fill` at the last position."""
    return jnp.concatenate([x[:, 1:], jnp.full_like(x[:, :1], fill)], axis=1)


def tokens_ahead(
    x: Shaped[Array, "b t *d"], cu_padded: Int[Array, " n"], cu_real: Int[Array, " n"], depth: int, fill: float = 0
) -> Shaped[Array, "k b t *d"]:
    """x rolled by 1 to `depth` tokens; `fill` where the token ahead is not a real token of the same document."""
    token = jnp.arange(x.shape[1])
    document = jnp.searchsorted(cu_padded[1:], token, side="right")
    end = (cu_padded[:-1] + jnp.diff(cu_real))[document]

    def rolled(k: int) -> Array:
        is_there = (token + k < end).reshape(1, -1, *[1] * (x.ndim - 2))
        return jnp.where(is_there, jnp.roll(x, -k, 1), jnp.full_like(x, fill))

    return jnp.stack([rolled(k) for k in range(1, depth + 1)])


def same(matrix: Shaped[Array, "t v"]) -> Shaped[Array, "t v"]:
    """The matrix itself, whether ranks shard it by rows or by columns."""
    return matrix


# 6. The k largest logits.


def topk(logits: Float[Array, "*a v"], k: int) -> tuple[Float[Array, "*a k"], Int[Array, "*a k"]]:
    """(values, ids) of the min(k, v) largest, descending; of equal values the lowest id first. -0 equals 0."""
    values, ids = lax.top_k(jnp.where(logits == 0, 0, logits), min(k, logits.shape[-1]))
    return values, ids


def logits_at(logits: Float[Array, "*a v"], ids: Int[Array, "*a k"]) -> Float[Array, "*a k"]:
    """z[ids[j]]; 0 without gradient for an id outside [0, v)."""
    in_vocabulary = (ids >= 0) & (ids < logits.shape[-1])
    return jnp.where(in_vocabulary, jnp.take_along_axis(logits, jnp.where(in_vocabulary, ids, 0), axis=-1), 0)


def columns(x: Float[Array, "*a v"], ids: Int[Array, " k"]) -> Float[Array, "*a k"]:
    """x[..., ids[j]], the same columns of every row; 0 without gradient for an id outside [0, v)."""
    return logits_at(x, jnp.broadcast_to(ids, (*x.shape[:-1], *ids.shape)))


def argmax(logits: Float[Array, "*a v"]) -> Int[Array, "*a"]:
    """The id of the largest logit; of equal logits the lowest id."""
    return topk(logits, 1)[1][..., 0]


def distillation(
    student_logits: Float[Array, "b f v"],
    teacher_topk_logits: Float[Array, "b s k"],
    teacher_topk_indices: Int[Array, "b s k"],
    zero_outside_topk: bool,
    calculate_entropy: bool,
) -> tuple[Float[Array, "b u k"], Float[Array, "b u k"], Float[Array, "b u"] | None]:
    """(student, teacher, entropy or None) at the teacher's k ids, without the last position.

    student   log softmax of its logits at the ids, over the full vocabulary or over these k logits
    teacher   log softmax over its k logits
    entropy   h = sum_v p_v log p_v over the student's full vocabulary

    A sum over k leaves out ids outside [0, v). The student's positions beyond the teacher's are padding.
    """
    ids = teacher_topk_indices[:, :-1]
    z, teacher = student_logits[:, : ids.shape[1]], teacher_topk_logits[:, :-1]
    slots = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
    if zero_outside_topk:
        student = gather_logprob(z, ids)
    else:
        in_vocabulary = (ids >= 0) & (ids < z.shape[-1])
        at_ids = jnp.where(in_vocabulary, logits_at(z, ids), -jnp.inf)
        student = gather_logprob(at_ids, jnp.where(in_vocabulary, slots, -1))
    return student, gather_logprob(teacher, slots), negative_entropy(z) if calculate_entropy else None


# 7. From hidden states.


def logits_of_hidden(hidden: Float[Array, "s b d"], weight: Float[Array, "v d"]) -> Float[Array, "b s v"]:
    """z[b, j] = h[j, b] W^T."""
    return jnp.einsum("sbd,vd->bsv", hidden, weight)


def linear_logprob(
    hidden: Float[Array, "s b d"], weight: Float[Array, "v d"], target: Int[Array, "b s"], temperature: float = 1.0
) -> Float[Array, "b s"]:
    """log p of an already shifted target, from hidden states."""
    return logprob(logits_of_hidden(hidden, weight), target, temperature)


def linear_next_token_logprob(
    hidden: Float[Array, "s b d"], weight: Float[Array, "v d"], target: Int[Array, "b s"], temperature: float = 1.0
) -> Float[Array, "b u"]:
    """log p of id j + 1 at position j, from hidden states."""
    return next_token_logprob(logits_of_hidden(hidden, weight), target, temperature=temperature)
