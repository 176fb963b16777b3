"""A mixture of experts on one device: every expert on every token, masked by the gates.

    y[t] = sum_e g[t, e] * expert_e(x[t])        expert(x) = (silu(x A) * (x B)) C

g[t, e] is the gate of expert e where token t chose it, else 0. Nothing is sorted and nothing is sent. Of equal numbers
the router takes the lower expert first. A choice is a slot j < k of a token t; `experts[t, j]` is the expert chosen.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Logits = Float[Array, "*t e"]
Gates = Float[Array, "*t k"]
Choices = Int[Array, "*t k"]
Routing = tuple[Gates, Choices, Logits]  # gates, experts, and the probabilities that balance losses are of


def softmax_top_k(logits: Logits, k: int, norm_topk_prob: bool = False) -> Routing:
    """p = softmax(logits); the k largest, divided by their sum with `norm_topk_prob`.  Source: arXiv 2101.03961."""
    probabilities = jax.nn.softmax(logits)
    gates, experts = jax.lax.top_k(probabilities, k)
    return _normalised(gates) if norm_topk_prob else gates, experts, probabilities


def top_k_softmax(logits: Logits, k: int) -> Routing:
    """The k largest logits; gates are the softmax over these k alone.  Source: arXiv 2401.04088."""
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

    A group of experts counts as much as the sum of its two largest s + bias. Gates are divided by their sum with
    `norm_topk_prob`, then scaled. The probabilities are s over its sum.  Source: arXiv 2412.19437.
    """
    scores = jax.nn.sigmoid(logits)
    biased = scores + jnp.broadcast_to(bias, scores.shape)
    # 1. The groups with the largest sums of two; the experts of the others cannot be chosen.
    by_group = biased.reshape(*biased.shape[:-1], groups, biased.shape[-1] // groups)
    of_two = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(-1)
    _, best = jax.lax.top_k(of_two, chosen_groups)
    is_chosen = _one_hot(best, groups).any(-2)
    candidates = jnp.where(is_chosen[..., None], by_group, -jnp.inf).reshape(biased.shape)
    # 2. The choice is by the biased scores, the gates are the plain ones.
    _, experts = jax.lax.top_k(candidates, k)
    gates = jnp.take_along_axis(scores, experts, -1)
    gates = (_normalised(gates) if norm_topk_prob else gates) * routed_scaling_factor
    return gates, experts, _normalised(scores)


def _normalised(x: Float[Array, "*t k"]) -> Float[Array, "*t k"]:
    return x / x.sum(-1, keepdims=True)


def _one_hot(numbers: Int[Array, "*k"], size: int) -> Bool[Array, "*k e"]:
    """True at each number; nowhere for one that is outside 0..size."""
    return jax.nn.one_hot(numbers, size, dtype=bool)


def balanced_bias(bias: Float[Array, " e"], counts: Int[Array, " e"], rate: float) -> Float[Array, " e"]:
    """The bias, up by `rate` for experts with fewer choices than the mean, down for those with more."""
    load = counts.astype(bias.dtype)
    return bias + rate * jnp.sign(load.mean() - load)


def swiglu(x: Float[Array, "t d"], gate_up: Float[Array, "d 2 f"], down: Float[Array, "f d"]) -> Float[Array, "t d"]:
    """(silu(x A) * (x B)) C, with A = gate_up[:, 0] and B = gate_up[:, 1]."""
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    return (jax.nn.silu(gate) * up) @ down


def gate_matrix(gates: Float[Array, "t k"], experts: Int[Array, "t k"], size: int) -> Float[Array, "t e"]:
    """g[t, e]: the gate of expert e for token t; 0 where it was not chosen."""
    return jnp.where(_one_hot(experts, size), gates[:, :, None], 0.0).sum(1)


def mixture(
    x: Float[Array, "t d"],
    gates: Float[Array, "t k"],
    experts: Int[Array, "t k"],
    gate_up: Float[Array, "e d 2 f"],
    down: Float[Array, "e f d"],
    kept: Bool[Array, "t k"] | None = None,
) -> Float[Array, "t d"]:
    """sum_e g[t, e] * expert_e(x[t]); a choice that was not `kept` has the gate 0."""
    if kept is not None:
        gates = jnp.where(kept, gates, 0.0)
    outputs = jax.vmap(swiglu, in_axes=(None, 0, 0))(x, gate_up, down)
    return jnp.einsum("te,etd->td", gate_matrix(gates, experts, len(down)), outputs)


def kept_by_position(experts: Choices, size: int, capacity: int) -> Bool[Array, "t k"]:
    """Of the choices of an expert the first `capacity`, tokens in their order; experts are 0 to size - 1."""
    e, order = experts.reshape(-1), jnp.arange(experts.size)
    is_before = (e[:, None] == e[None, :]) & (order[None, :] < order[:, None])
    return (is_before.sum(1) < capacity).reshape(experts.shape) & (experts >= 0) & (experts < size)


def kept_by_probability(experts: Choices, gates: Float[Array, "t k"], size: int, capacity: int) -> Bool[Array, "t k"]:
    """Of the choices of an expert the `capacity` with the largest gates; of equal gates the first."""
    e, g, order = experts.reshape(-1), gates.reshape(-1), jnp.arange(experts.size)
    is_larger = (g[None, :] > g[:, None]) | ((g[None, :] == g[:, None]) & (order[None, :] < order[:, None]))
    is_before = (e[:, None] == e[None, :]) & is_larger
    return (is_before.sum(1) < capacity).reshape(experts.shape) & (experts >= 0) & (experts < size)


def load_counts(experts: Choices, size: int) -> Int[Array, " e"]:
    """How many choices each expert has."""
    return _one_hot(experts.reshape(-1), size).sum(0)


def is_token(experts: Choices, size: int) -> Bool[Array, "*t"]:
    """True for a row with at least one expert; padding has none."""
    return _one_hot(experts, size).any((-2, -1))


def balance_loss(probabilities: Float[Array, "t e"], experts: Int[Array, "t k"]) -> Float[Array, ""]:
    """e * sum_e f_e P_e;  f_e the share of the choices that expert e has, P_e the mean probability of e over tokens.

    A row without an expert is no token: neither f nor P has it. A row with some of its k experts is a token, and f has
    the choices that it has. 1 where f or P is equal over the experts, 0 without tokens. f is a count and has no
    gradient.  Source: arXiv 2101.03961.
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
    """The balance loss of each sequence by itself.  Source: arXiv 2412.19437."""
    return jax.vmap(balance_loss)(probabilities, experts)


def z_loss(logits: Float[Array, "t e"], experts: Int[Array, "t k"] | None = None) -> Float[Array, ""]:
    """The mean over tokens of (log sum_e exp(logits[t, e]))^2; rows without an expert are no tokens.

    Without `experts` every row is a token.  Source: arXiv 2202.08906.
    """
    if experts is None:
        return (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
    tokens = is_token(experts, logits.shape[-1])
    # Padding may hold NaN, so it is replaced before the exponential and not only after it.
    squares = jax.nn.logsumexp(jnp.where(tokens[:, None], logits, 0.0), axis=-1) ** 2
    return jnp.where(tokens, squares, 0.0).sum() / _at_least_one(tokens, logits)
