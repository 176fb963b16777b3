"""A hybrid language model on unsharded packed streams, with the loss of a step and the optimiser.

Document j of a stream is at `padded[j]:padded[j + 1]`; its first `real[j + 1] - real[j]` tokens are real.

Source: arXiv 2104.09864 (rotary positions), 1711.05101 (AdamW).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_ref.context_parallel import packed_attention
from jax_ref.expert_parallel import mixture, sequence_balance_loss, softmax_top_k, z_loss
from jax_ref.mamba import Mamba2
from jax_ref.vocab_parallel import tokens_ahead


@dataclass(frozen=True)
class Config:
    """`layers` has the kind of each layer: attention, mamba or moe. The chunk size of a scan changes no value."""

    vocab_size: int
    hidden_size: int
    layers: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state_size: int
    conv_width: int
    rope_base: float
    norm_eps: float
    is_tied: bool
    chunk_size: int | None = None
    num_experts: int = 1
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 1
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0


def rotated(x: Float[Array, "b h s p"], position: Int[Array, " s"], base: float) -> Float[Array, "b h s p"]:
    """Rotary positions: columns i and i + p/2 form a point, rotated at position m by m * base^(-2 i / p)."""
    half = x.shape[-1] // 2
    # 1. The angle for each position and pair of columns.
    speed = base ** (-2.0 * jnp.arange(half).astype(x.dtype) / x.shape[-1])
    angle = position.astype(x.dtype)[:, None] * speed[None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotation = jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])  # [to, from, s, i]
    # 2. The two halves of the columns are the coordinates of p/2 points; one einsum rotates them all.
    points = x.reshape(*x.shape[:-1], 2, half)
    return jnp.einsum("ocsi,bhsci->bhsoi", rotation, points).reshape(x.shape)


class Attention(nnx.Module):
    """out = o_proj(attention(rotated(q), rotated(k), v)), causal inside each document."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        d, p = config.hidden_size, config.head_dim
        self.head_dim, self.base = p, config.rope_base
        query_width, kv_width = config.num_attention_heads * p, config.num_key_value_heads * p
        self.q_proj = nnx.Linear(d, query_width, use_bias=False, rngs=rngs)
        self.k_proj = nnx.Linear(d, kv_width, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(d, kv_width, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Linear(query_width, d, use_bias=False, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b s d"], padded: Int[Array, " n"], real: Int[Array, " n"]
    ) -> Float[Array, "b s d"]:
        """Document j is at `padded[j]:padded[j + 1]`; its first `real[j + 1] - real[j]` tokens are real."""
        b, s, _ = x.shape
        token = jnp.arange(s)
        # A token's document index is the number of documents that end at or before it; positions count from its start.
        position = token - padded[(token[:, None] >= padded[None, 1:]).sum(1)]
        q, k, v = (
            jnp.swapaxes(project(x).reshape(b, s, -1, self.head_dim), 1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, position, self.base), rotated(k, position, self.base)
        out = packed_attention(q, k, v, padded, real)
        return self.o_proj(jnp.swapaxes(out, 1, 2).reshape(b, s, -1))


class Embed(nnx.Module):
    """The table's row for each id. nnx.Embed would round the table to float32."""

    def __init__(self, vocab: int, width: int):
        self.embedding = nnx.Param(jnp.zeros((vocab, width)))

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        return self.embedding[...][ids]


class Norm(nnx.Module):
    """RMS norm: x divided by its root mean square, times a weight."""

    def __init__(self, width: int, eps: float):
        self.eps, self.weight = eps, nnx.Param(jnp.ones(width))

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
        return x / jnp.sqrt(mean_square + self.eps) * self.weight[...][None, None, :]


def is_padding(padded: Int[Array, " n"], real: Int[Array, " n"], length: int) -> Bool[Array, " t"]:
    """Whether each of `length` tokens of a stream is padding, behind the real tokens of its document."""
    token, start = jnp.arange(length)[:, None], padded[None, :-1]
    return ~((token >= start) & (token < start + jnp.diff(real)[None])).any(-1)


class Mlp(nnx.Module):
    """(down_proj(silu(gate_proj(x)) * up_proj(x)), a router loss of 0)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nnx.Linear(d, inner, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(d, inner, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(inner, d, use_bias=False, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b s d"], is_padding: Bool[Array, " s"]
    ) -> tuple[Float[Array, "b s d"], Float[Array, ""]]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x)), jnp.zeros((), x.dtype)


class Experts(nnx.Module):
    """sum_e g[t, e] * expert_e(x[t]); the first f rows of gate_up_proj[e] are the gate's, the last f rows up's."""

    def __init__(self, config: Config):
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj, self.down_proj = nnx.Param(jnp.zeros((e, 2 * f, d))), nnx.Param(jnp.zeros((e, d, f)))

    def __call__(
        self, x: Float[Array, "t d"], gates: Float[Array, "t k"], experts: Int[Array, "t k"]
    ) -> Float[Array, "t d"]:
        gate_up, down = self.gate_up_proj[...], self.down_proj[...]
        e, rows, d = gate_up.shape
        # [e, gate|up, f, d] -> [e, d, gate|up, f]
        columns = gate_up.reshape(e, 2, rows // 2, d).transpose(0, 3, 1, 2)
        return mixture(x, gates, experts, columns, down.transpose(0, 2, 1))


class Moe(nnx.Module):
    """Each token's experts have the k largest p = softmax(router(x)); gates are these p divided by their sum.

    Padding has no expert: its output is 0, and no loss counts it.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.k, self.coefficients = config.num_experts_per_tok, (config.balance_coefficient, config.z_coefficient)
        self.router = nnx.Linear(config.hidden_size, config.num_experts, use_bias=False, rngs=rngs)
        self.experts = Experts(config)

    def __call__(
        self, x: Float[Array, "b s d"], is_padding: Bool[Array, " s"]
    ) -> tuple[Float[Array, "b s d"], Float[Array, ""]]:
        """(output, router loss): the weighted balance loss and z-loss, as a mean over sequences."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        gates, experts, probabilities = softmax_top_k(logits, self.k, norm_topk_prob=True)
        experts = jnp.where(jnp.tile(is_padding, len(x))[:, None], -1, experts)
        by_sequence = (each.reshape(*x.shape[:2], -1) for each in (probabilities, experts))
        balance, z = self.coefficients
        loss = balance * sequence_balance_loss(*by_sequence).mean() + z * z_loss(logits, experts)
        return self.experts(tokens, gates, experts).reshape(x.shape), loss


class AttentionLayer(nnx.Module):
    """(y + mlp(norm(y)), router loss), with y = x + attention(norm(x))."""

    def __init__(self, config: Config, mlp: type[Mlp] | type[Moe] = Mlp, *, rngs: nnx.Rngs):
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b s d"], padded: Int[Array, " n"], real: Int[Array, " n"]
    ) -> tuple[Float[Array, "b s d"], Float[Array, ""]]:
        x = x + self.self_attn(self.input_layernorm(x), padded, real)
        y, router_loss = self.mlp(self.post_attention_layernorm(x), is_padding(padded, real, x.shape[1]))
        return x + y, router_loss


class MambaLayer(nnx.Module):
    """(x + mamba(norm(x)), a router loss of 0)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.mixer = Mamba2(
            config.hidden_size,
            num_heads=config.mamba_heads,
            head_dim=config.mamba_head_dim,
            n_groups=config.mamba_groups,
            d_state=config.state_size,
            d_conv=config.conv_width,
            norm_eps=config.norm_eps,
            rngs=rngs,
        )

    def __call__(
        self, x: Float[Array, "b s d"], padded: Int[Array, " n"], real: Int[Array, " n"]
    ) -> tuple[Float[Array, "b s d"], Float[Array, ""]]:
        return x + self.mixer(self.input_layernorm(x), padded), jnp.zeros((), x.dtype)


LAYERS = {"attention": AttentionLayer, "mamba": MambaLayer, "moe": partial(AttentionLayer, mlp=Moe)}


class HybridLM(nnx.Module):
    """logits = lm_head(norm(layers(embed_tokens(ids)))); a tied head is the embedding's transpose."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        d, v = config.hidden_size, config.vocab_size
        self.embed_tokens = Embed(v, d)
        self.layers = nnx.List([LAYERS[kind](config, rngs=rngs) for kind in config.layers])
        self.norm = Norm(d, config.norm_eps)
        self.lm_head = None if config.is_tied else nnx.Linear(d, v, use_bias=False, rngs=rngs)

    def __call__(
        self, ids: Int[Array, "b s"], padded: Int[Array, " n"], real: Int[Array, " n"]
    ) -> Float[Array, "b s v"]:
        """Logits; every row has the same documents, with padded offsets `padded` and real offsets `real`."""
        return self.logits_and_router_loss(ids, padded, real)[0]

    def logits_and_router_loss(
        self, ids: Int[Array, "b s"], padded: Int[Array, " n"], real: Int[Array, " n"]
    ) -> tuple[Float[Array, "b s v"], Float[Array, ""]]:
        """(logits, the sum of all routers' losses, each a mean over the rows)."""
        x = self.embed_tokens(ids)
        router_loss = jnp.zeros((), x.dtype)
        for layer in self.layers:
            x, layer_loss = layer(x, padded, real)
            router_loss = router_loss + layer_loss
        x = self.norm(x)
        # One parameter with two uses: the gradient of a tied head is the sum over both.
        if self.lm_head is None:
            return jnp.einsum("bsd,vd->bsv", x, self.embed_tokens.embedding[...]), router_loss
        return self.lm_head(x), router_loss


def next_ids(
    ids: Int[Array, " t"], padded: Int[Array, " n"], real: Int[Array, " n"]
) -> tuple[Int[Array, " t"], Bool[Array, " t"]]:
    """(the next real token of the same document, whether it exists), for each token."""
    token, targets, has_target = jnp.arange(len(ids)), jnp.zeros_like(ids), jnp.zeros(len(ids), bool)
    for j in range(len(padded) - 1):
        # The last real token of a document has no target, and neither has padding.
        last = padded[j] + real[j + 1] - real[j] - 1
        has_next = (token >= padded[j]) & (token < last)
        targets = jnp.where(has_next, ids[jnp.minimum(token + 1, len(ids) - 1)], targets)
        has_target |= has_next
    return targets, has_target


def token_losses(
    logits: Float[Array, "s v"], targets: Int[Array, " s"], is_valid: Bool[Array, " s"]
) -> Float[Array, " s"]:
    """-log p(target); 0 for tokens that are not valid."""
    target_logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=-1)[:, 0]
    return jnp.where(is_valid, -target_logprob, 0.0)


def normalised(losses: Sequence[Float[Array, " s"]], is_valid: Sequence[Bool[Array, " s"]]) -> Float[Array, ""]:
    """-sum_i log softmax(z_i)[target_i] / max(count, 1), over the valid tokens i of all streams."""
    # Divide by the count of the full step, not of each stream: a mean of means would give short streams more weight.
    count = sum(each.sum() for each in is_valid)
    return sum(each.sum() for each in losses) / jnp.maximum(count, 1).astype(losses[0].dtype)


def aggregated(
    losses: Float[Array, "b s"], mask: Bool[Array, "b s"], aggregation: str, constant: int = 1
) -> Float[Array, ""]:
    """The loss of a step from the losses of its tokens; a sequence without a token of the mask is not counted.

    Every mode is divided by `constant` besides.
    """
    counted, lengths = jnp.where(mask, losses, 0.0), mask.sum(-1)
    number, sequences = (jnp.maximum(x, 1).astype(losses.dtype) for x in (lengths, (lengths > 0).sum()))
    modes = {
        "token_mean": counted.sum() / jnp.maximum(lengths.sum(), 1).astype(losses.dtype),
        "sequence_mean_of_token_means": (counted.sum(-1) / number).sum() / sequences,
        "sequence_mean_of_token_sums": counted.sum(-1).sum() / sequences,
        "token_sum": counted.sum(),
    }
    return modes[aggregation] / constant


def multi_token_losses(
    hidden_states: Float[Array, "m b t d"],
    weight: Float[Array, "v d"],
    targets: Int[Array, "b t"],
    cu_padded: Int[Array, " n"],
    cu_real: Int[Array, " n"],
    coefficient: float,
    aggregation: str = "token_mean",
    constant: int = 1,
) -> Float[Array, " m"]:
    """The loss of each depth: at depth k the target is the one k tokens ahead; the mean over k >= 1 is weighted."""
    depths = len(hidden_states) - 1
    further = [tokens_ahead(targets, cu_padded, cu_real, depths, -100)] if depths else []
    ids = jnp.concatenate([targets[None], *further])
    is_valid = (ids >= 0) & (ids < len(weight))
    logprob = jax.nn.log_softmax(hidden_states @ weight.T)
    losses = -jnp.take_along_axis(logprob, jnp.where(is_valid, ids, 0)[..., None], -1)[..., 0]
    means = [aggregated(each, mask, aggregation, constant) for each, mask in zip(losses, is_valid, strict=True)]
    return jnp.stack([means[0], *(coefficient / depths * mean for mean in means[1:])])


def contrastive_loss(
    queries: Float[Array, "b d"], keys: Float[Array, "b d"], log_scale: Float[Array, ""]
) -> Float[Array, ""]:
    """The mean cross entropy of each query's key among all keys, and of each key's query among all queries."""
    scores = jnp.exp(log_scale) * queries @ keys.T
    both = jax.nn.log_softmax(scores, 1) + jax.nn.log_softmax(scores, 0)
    return -jnp.diagonal(both).sum() / (2 * max(len(queries), 1))


def step_loss(
    model: HybridLM, ids: Int[Array, "i t"], padded: Int[Array, "i n"], real: Int[Array, "i n"]
) -> Float[Array, ""]:
    """The loss of i streams plus the mean of their router losses; row j of the offsets belongs to stream j."""

    def stream_losses(ids: Array, padded: Array, real: Array) -> tuple[Array, Array, Array]:
        targets, is_valid = next_ids(ids, padded, real)
        logits, router_loss = model.logits_and_router_loss(ids[None], padded, real)
        return token_losses(logits[0], targets, is_valid), is_valid, router_loss

    losses, is_valid, router_losses = jax.vmap(stream_losses)(ids, padded, real)
    return normalised(list(losses), list(is_valid)) + router_losses.mean()


def adamw(rate: float, decay: float) -> optax.GradientTransformation:
    """The AdamW optimiser. Step k computes

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    w <- w - rate * (m / (1 - b1^k) / (sqrt(v / (1 - b2^k)) + eps) + decay * w)
    """
    return optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=decay)
