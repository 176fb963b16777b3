"""A mixture of experts on one device: every expert runs on every token, and gates mask the results.

    y[t] = sum_e g[t, e] * expert_e(x[t])        expert(x) = (silu(x A) * (x B)) C

g[t, e] is the gate of expert e if token t chose it, else 0. Nothing is sorted or sent. Among equal scores the router
prefers the lower expert id. A choice is a slot j < k of a token t; `experts[t, j]` is the chosen expert.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Logits = Float[Array, "*t e"]
Gates = Float[Array, "*t k"]
Choices = Int[Array, "*t k"]
Routing = tuple[Gates, Choices, Logits]  # gates, experts, and the probabilities for balance losses


def softmax_top_k(logits: Logits, k: int, norm_topk_prob: bool = False) -> Routing:
    """p = softmax(logits); the k largest, divided by their sum with `norm_topk_prob`. Source: arXiv 2101.03961."""
    probabilities = jax.nn.softmax(logits)
    gates, experts = jax.lax.top_k(probabilities, k)
    return _normalised(gates) if norm_topk_prob else gates, experts, probabilities


def top_k_softmax(logits: Logits, k: int) -> Routing:
    """The k largest logits; gates are the softmax over these k alone. Source: arXiv 2401.04088."""
    largest, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(largest), experts, jax.nn.softmax(logits)


def sigmoid_top_k(
    logits: Logits,
    bias: Float[Array, " e"],
    k: int,
    *,
    groups: int = 1,
    chosen_groups: int = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
) -> Routing:
    """s = sigmoid(logits); the k largest of s + bias among the chosen groups; gates are s, without the bias.

    The score of a group of experts is the sum of its two largest s + bias. Gates are divided by their sum with
    `norm_topk_prob`, then scaled. The probabilities are s divided by its sum. Source: arXiv 2412.19437.
    """
    scores = jax.nn.sigmoid(logits)
    biased = scores + jnp.broadcast_to(bias, scores.shape)
    # 1. The groups with the largest scores; experts of other groups cannot be chosen.
    by_group = biased.reshape(*biased.shape[:-1], groups, biased.shape[-1] // groups)
    group_scores = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(-1)
    _, best = jax.lax.top_k(group_scores, chosen_groups)
    is_chosen = _one_hot(best, groups).any(-2)
    candidates = jnp.where(is_chosen[..., None], by_group, -jnp.inf).reshape(biased.shape)
    # 2. Choose by biased scores; gates are the scores without bias.
    _, experts = jax.lax.top_k(candidates, k)
    gates = jnp.take_along_axis(scores, experts, -1)
    gates = (_normalised(gates) if norm_topk_prob else gates) * routed_scaling_factor
    return gates, experts, _normalised(scores)


def replayed(logits: Logits, experts: Choices, router: str, norm_topk_prob: bool = False) -> Gates:
    """The gates at given experts: of "softmax", of "sigmoid", or of "top_k", a softmax over these experts alone.

    An id that is no expert's has a gate of 0. The choice is data, so that gradients are of the scores alone. A token
    without an expert has no logits that count.
    """
    is_expert = _one_hot(experts, logits.shape[-1])
    logits = jnp.where(is_expert.any((-1, -2))[..., None], logits, 0.0)
    weights = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "top_k": jnp.exp}[router](logits)
    gates = jnp.where(is_expert, weights[..., None, :], 0.0).sum(-1)
    total = gates.sum(-1, keepdims=True)
    normalised = gates / jnp.where(total == 0, 1.0, total)
    return normalised if norm_topk_prob or router == "top_k" else gates


def _normalised(x: Float[Array, "*t k"]) -> Float[Array, "*t k"]:
    return x / x.sum(-1, keepdims=True)


def _one_hot(numbers: Int[Array, "*k"], size: int) -> Bool[Array, "*k e"]:
    """True at each number's column; all False for a number outside 0..size - 1."""
    return jax.nn.one_hot(numbers, size, dtype=bool)


def balanced_bias(bias: Float[Array, " e"], counts: Int[Array, " e"], rate: float) -> Float[Array, " e"]:
    """The bias, raised by `rate` for experts with fewer choices than the mean, lowered for experts with more."""
    load = counts.astype(bias.dtype)
    return bias + rate * jnp.sign(load.mean() - load)


def swiglu(x: Float[Array, "t d"], gate_up: Float[Array, "d 2 f"], down: Float[Array, "f d"]) -> Float[Array, "t d"]:
    """(silu(x A) * (x B)) C, with A = gate_up[:, 0] and B = gate_up[:, 1]."""
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    return (jax.nn.silu(gate) * up) @ down


def clamped_swiglu(
    x: Float[Array, "t d"],
    gate_up: Float[Array, "d f 2"],
    down: Float[Array, "f d"],
    gate_up_bias: Float[Array, "f 2"],
    down_bias: Float[Array, " d"],
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Float[Array, "t d"]:
    """((up + 1) * gate * sigmoid(alpha * gate)) C + c, of clamped gate and up. Source: arXiv 2508.10925."""
    gate = jnp.minimum(x @ gate_up[:, :, 0] + gate_up_bias[None, :, 0], limit)
    up = jnp.clip(x @ gate_up[:, :, 1] + gate_up_bias[None, :, 1], -limit, limit)
    return ((up + 1) * gate * jax.nn.sigmoid(alpha * gate)) @ down + down_bias[None, :]


def gate_matrix(gates: Float[Array, "t k"], experts: Int[Array, "t k"], size: int) -> Float[Array, "t e"]:
    """g[t, e]: the gate of expert e for token t; 0 if the token did not choose the expert."""
    return jnp.where(_one_hot(experts, size), gates[:, :, None], 0.0).sum(1)


def mixture(
    x: Float[Array, "t d"],
    gates: Float[Array, "t k"],
    experts: Int[Array, "t k"],
    gate_up: Float[Array, "e d 2 f"],
    down: Float[Array, "e f d"],
    kept: Bool[Array, "t k"] | None = None,
) -> Float[Array, "t d"]:
    """sum_e g[t, e] * expert_e(x[t]); choices that are not `kept` have gate 0."""
    if kept is not None:
        gates = jnp.where(kept, gates, 0.0)
    outputs = jax.vmap(swiglu, in_axes=(None, 0, 0))(x, gate_up, down)
    return jnp.einsum("te,etd->td", gate_matrix(gates, experts, len(down)), outputs)


def mixture_with_biases(
    x: Float[Array, "t d"],
    gates: Float[Array, "t k"],
    experts: Int[Array, "t k"],
    gate_up: Float[Array, "e d f 2"],
    down: Float[Array, "e f d"],
    gate_up_bias: Float[Array, "e f 2"],
    down_bias: Float[Array, "e d"],
    limit: float = 7.0,
) -> Float[Array, "t d"]:
    """sum_e g[t, e] * expert_e(x[t]), of experts with biases and the clamped unit of gpt-oss."""
    unit = functools.partial(clamped_swiglu, limit=limit)
    outputs = jax.vmap(unit, in_axes=(None, 0, 0, 0, 0))(x, gate_up, down, gate_up_bias, down_bias)
    return jnp.einsum("te,etd->td", gate_matrix(gates, experts, len(down)), outputs)


def kept_by_position(experts: Choices, size: int, capacity: int) -> Bool[Array, "t k"]:
    """Mask of the first `capacity` choices of each expert, in token order; experts are 0 to size - 1."""
    e, order = experts.reshape(-1), jnp.arange(experts.size)
    is_before = (e[:, None] == e[None, :]) & (order[None, :] < order[:, None])
    return (is_before.sum(1) < capacity).reshape(experts.shape) & (experts >= 0) & (experts < size)


def kept_by_probability(experts: Choices, gates: Float[Array, "t k"], size: int, capacity: int) -> Bool[Array, "t k"]:
    """Mask of each expert's `capacity` choices with the largest gates; of equal gates the first."""
    e, g, order = experts.reshape(-1), gates.reshape(-1), jnp.arange(experts.size)
    is_larger = (g[None, :] > g[:, None]) | ((g[None, :] == g[:, None]) & (order[None, :] < order[:, None]))
    is_before = (e[:, None] == e[None, :]) & is_larger
    return (is_before.sum(1) < capacity).reshape(experts.shape) & (experts >= 0) & (experts < size)


def load_counts(experts: Choices, size: int) -> Int[Array, " e"]:
    """The number of choices of each expert."""
    return _one_hot(experts.reshape(-1), size).sum(0)


def is_token(experts: Choices, size: int) -> Bool[Array, "*t"]:
    """True for a row with at least one expert; padding has none."""
    return _one_hot(experts, size).any((-2, -1))


def balance_loss(probabilities: Float[Array, "t e"], experts: Int[Array, "t k"]) -> Float[Array, ""]:
    """e * sum_e f_e P_e;  f_e is expert e's share of all choices, P_e its mean probability over tokens.

    A row without an expert is padding and counts in neither. A row with some of its k experts is a token, and f counts
    the choices that it has. The loss is 1 if f or P is uniform, 0 without tokens. f is a count and has no gradient.
    Source: arXiv 2101.03961.
    """
    size = probabilities.shape[-1]
    counts, tokens = load_counts(experts, size).astype(probabilities.dtype), is_token(experts, size)
    share = counts / jnp.maximum(counts.sum(), 1.0)
    mean = jnp.where(tokens[:, None], probabilities, 0.0).sum(0) / _at_least_one(tokens, probabilities)
    return size * (share * mean).sum()


def _at_least_one(tokens: Bool[Array, "*t"], like: Float[Array, "..."]) -> Float[Array, ""]:
    """The number of tokens; 1 without any, so that a sum over none divided by it is 0."""
    return jnp.maximum(tokens.sum(), 1).astype(like.dtype)


def sequence_balance_loss(probabilities: Float[Array, "b s e"], experts: Int[Array, "b s k"]) -> Float[Array, " b"]:
    """The balance loss of each sequence separately. Source: arXiv 2412.19437."""
    return jax.vmap(balance_loss)(probabilities, experts)


def z_loss(logits: Float[Array, "t e"], experts: Int[Array, "t k"] | None = None) -> Float[Array, ""]:
    """The mean over tokens of (log sum_e exp(logits[t, e]))^2; rows without an expert are no tokens.

    Without `experts` every row is a token. Source: arXiv 2202.08906.
    """
    if experts is None:
        return (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
    tokens = is_token(experts, logits.shape[-1])
    # Padding may hold NaN, so it is replaced before the exponential and not only after it.
    squares = jax.nn.logsumexp(jnp.where(tokens[:, None], logits, 0.0), axis=-1) ** 2
    return jnp.where(tokens, squares, 0.0).sum() / _at_least_one(tokens, logits)
