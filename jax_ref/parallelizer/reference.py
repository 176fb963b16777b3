"""Llama-like decoders on one device, and their training: Llama, Qwen2, Qwen3, Mistral, Gemma, Phi3.

    x = E[ids];   x = x + attention(norm(x));   x = x + mlp(norm(x));   logits = norm(x) H^T,  H = E where tied
    loss = -(1/N) sum log p[target],   N tokens with a target;   w = w - lr * (m / (sqrt(v) + eps) + decay * w)

Parameters have the names of the Hugging Face model; `DecoderTraits` has the differences between families. A target
outside the vocabulary, such as -100, is ignored. m and v are the bias-corrected means of g and g^2.
Source: arXiv 2104.09864 (rotary), 2305.13245 (KV groups), 1711.05101 (AdamW).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from jax_ref.context_parallel import dense_attention
from jax_ref.vocab_parallel import logprob

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class DecoderTraits:
    """Sizes and rules of one decoder.

    `windows` has, for each layer, the number of keys that a query sees, itself included; None: all earlier keys.
    `rotated` is the number of rotated columns per head. A norm multiplies by `norm_offset` + weight.
    The lookup of `padding_id` has no gradient, as in torch.nn.Embedding.
    """

    vocab: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    windows: tuple[int | None, ...]
    eps: float
    rope_theta: float
    rotated: int
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    is_fused: bool = False
    is_tied: bool = False
    embed_scale: float = 1.0
    norm_offset: float = 0.0
    padding_id: int | None = None

    @classmethod
    def of(cls, config: Any) -> DecoderTraits:
        """The traits of a Hugging Face config. Errors: ValueError for an unknown family, rotation or activation."""
        family, attention_bias = config.model_type, bool(getattr(config, "attention_bias", False))
        if family not in FAMILIES:
            raise ValueError(f"decoder: model_type {family!r} is not one of {', '.join(FAMILIES)}")
        rope = config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"decoder: rope_type {rope['rope_type']!r} is not 'default', the one defined here")
        if config.hidden_act not in ACTIVATIONS:
            raise ValueError(f"decoder: hidden_act {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")
        if getattr(config, "use_bidirectional_attention", None):
            raise ValueError("decoder: use_bidirectional_attention=True is not defined here; attention is causal")
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        biases = {
            "qkv_bias": attention_bias,
            "out_bias": attention_bias,
            "mlp_bias": bool(getattr(config, "mlp_bias", False)),
            **FAMILIES[family],
        }
        return cls(
            vocab=config.vocab_size,
            width=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=head_width,
            windows=_windows(config),
            eps=config.rms_norm_eps,
            rope_theta=rope["rope_theta"],
            rotated=int(head_width * rope.get("partial_rotary_factor", 1.0)),
            activation=ACTIVATIONS[config.hidden_act],
            is_tied=bool(config.tie_word_embeddings),
            embed_scale=config.hidden_size**0.5 if family == "gemma" else 1.0,
            padding_id=config.pad_token_id,
            **biases,
        )


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "out_bias": False},
    "qwen3": {"has_qk_norm": True},
    "mistral": {"qkv_bias": False, "out_bias": False},
    "gemma": {"norm_offset": 1.0},
    "phi3": {"is_fused": True},
}


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    # Without a list of kinds, all layers have the config's window, if any.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


ACTIVATE = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


class Linear(nnx.Module):
    """x W^T + bias."""

    def __init__(self, inputs: int, outputs: int, has_bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if has_bias else None

    def __call__(self, x: Float[Array, "b s i"]) -> Float[Array, "b s o"]:
        y = jnp.einsum("bsi,oi->bso", x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, None, :]


class Embedding(nnx.Module):
    """The weight's row for each id; the row of `padding_id` gets no gradient."""

    def __init__(self, vocab: int, width: int, padding_id: int | None):
        self.padding_id = padding_id
        self.weight = nnx.Param(jnp.zeros((vocab, width)))

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        rows = self.weight[...][ids]
        # torch.nn.Embedding gives the row of `padding_idx` no gradient.
        if self.padding_id is None:
            return rows
        return jnp.where((ids == self.padding_id)[..., None], jax.lax.stop_gradient(rows), rows)


class RMSNorm(nnx.Module):
    """x / sqrt(mean x^2 + eps) * (offset + weight), over the last dim."""

    def __init__(self, width: int, eps: float, offset: float = 0.0):
        self.eps, self.offset = eps, offset
        self.weight = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Float[Array, "*a d"]) -> Float[Array, "*a d"]:
        normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.eps)
        scale = self.offset + self.weight[...]
        return normed * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


class GatedMLP(nnx.Module):
    """(act(x Wg^T) * x Wu^T) Wd^T; Wg and Wu are stacked into one matrix if the family fuses them."""

    def __init__(self, traits: DecoderTraits):
        d, i, bias = traits.width, traits.inner, traits.mlp_bias
        self.activation, self.is_fused = traits.activation, traits.is_fused
        if traits.is_fused:
            self.gate_up_proj = Linear(d, 2 * i)
        else:
            self.gate_proj, self.up_proj = Linear(d, i, bias), Linear(d, i, bias)
        self.down_proj = Linear(i, d, bias)

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        if self.is_fused:
            gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(ACTIVATE[self.activation](gate) * up)


class Attention(nnx.Module):
    """q, k, v = x Wq^T, x Wk^T, x Wv^T;   q, k = R(q), R(k);   y = softmax(q k^T / sqrt(p)) v;   y Wo^T.

    R rotates columns j and j + r/2 of the first r columns by the angle  position * theta^(-2j/r). Parameters have their
    torch names; Wq, Wk and Wv are one matrix if the family fuses them.
    """

    def __init__(self, traits: DecoderTraits, window: int | None):
        self.traits, self.window = traits, window
        p = traits.head_width
        queries, keys = traits.heads * p, traits.kv_heads * p
        if traits.is_fused:
            self.qkv_proj = Linear(traits.width, queries + 2 * keys)
        else:
            self.q_proj = Linear(traits.width, queries, traits.qkv_bias)
            self.k_proj = Linear(traits.width, keys, traits.qkv_bias)
            self.v_proj = Linear(traits.width, keys, traits.qkv_bias)
        self.o_proj = Linear(queries, traits.width, traits.out_bias)
        if traits.has_qk_norm:
            self.q_norm, self.k_norm = RMSNorm(p, traits.eps), RMSNorm(p, traits.eps)

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        q, k, v = (_heads(part, self.traits.head_width) for part in self._projected(x))
        if self.traits.has_qk_norm:
            # Over the columns of one head, and before the rotation, as in Qwen3.
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotated(part, self.traits.rotated, self.traits.rope_theta) for part in (q, k))
        q, k, v = (part.swapaxes(1, 2) for part in (q, k, v))
        y = dense_attention(q, k, v, window=self.window)
        return self.o_proj(y.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    def _projected(self, x: Float[Array, "b s d"]) -> list[Array]:
        if not self.traits.is_fused:
            return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        queries, keys = (count * self.traits.head_width for count in (self.traits.heads, self.traits.kv_heads))
        return jnp.split(self.qkv_proj(x), [queries, queries + keys], axis=-1)


def rotated(x: Float[Array, "b s h p"], columns: int, theta: float) -> Float[Array, "b s h p"]:
    """Rotate the first `columns` columns of each head by angles that depend on the position."""
    # 1. The angle for each position and pair of columns.
    rate = theta ** (-jnp.arange(0, columns, 2).astype(x.dtype) / columns)
    angle = jnp.arange(x.shape[1]).astype(x.dtype)[:, None] * rate[None, :]
    cos, sin = (part[None, :, None, :] for part in (jnp.cos(angle), jnp.sin(angle)))
    # 2. The two halves of the rotated columns are coordinates of points; later columns do not change.
    first, second, rest = jnp.split(x, [columns // 2, columns], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _heads(x: Float[Array, "b s i"], width: int) -> Float[Array, "b s h p"]:
    return x.reshape(*x.shape[:2], -1, width)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class DecoderLayer(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, traits: DecoderTraits, window: int | None):
        self.input_layernorm = RMSNorm(traits.width, traits.eps, traits.norm_offset)
        self.self_attn = Attention(traits, window)
        self.post_attention_layernorm = RMSNorm(traits.width, traits.eps, traits.norm_offset)
        self.mlp = GatedMLP(traits)

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nnx.Module):
    """The decoder without its head."""

    def __init__(self, traits: DecoderTraits):
        self.embed_tokens = Embedding(traits.vocab, traits.width, traits.padding_id)
        self.layers = nnx.List([DecoderLayer(traits, window) for window in traits.windows])
        self.norm = RMSNorm(traits.width, traits.eps, traits.norm_offset)


class Decoder(nnx.Module):
    """Logits from token ids, in the stages `embed`, each of `layers`, and `head`."""

    def __init__(self, traits: DecoderTraits):
        self.traits = traits
        self.model = Trunk(traits)
        self.lm_head = None if traits.is_tied else Linear(traits.width, traits.vocab)

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s v"]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    @property
    def layers(self) -> nnx.List:
        return self.model.layers

    def embed(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        return self.model.embed_tokens(ids) * self.traits.embed_scale

    def head(self, x: Float[Array, "b s d"]) -> Float[Array, "b s v"]:
        # A tied weight is one parameter with two uses: its gradient is the sum over both.
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return jnp.einsum("bsd,vd->bsv", self.model.norm(x), weight[...])


def from_state_dict(config: Any, arrays: Mapping[str, Any]) -> Decoder:
    """The decoder for a config, with parameters from a torch state dict.

    A tied head may be omitted. Errors: ValueError for a name that is missing or unknown, for another shape, and for a
    tied head that differs from the embedding.
    """
    traits = config if isinstance(config, DecoderTraits) else DecoderTraits.of(config)
    # 1. The names and shapes for this config, without memory for values.
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(traits)))
    leaves = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    # 2. A state dict of torch lists a tied head under both names.
    parameters = {name: jnp.asarray(array) for name, array in arrays.items()}
    if traits.is_tied and HEAD in parameters:
        _check_tied(parameters)
        del parameters[HEAD]
    missing, unknown = sorted(set(leaves) - set(parameters)), sorted(set(parameters) - set(leaves))
    if missing or unknown:
        raise ValueError(f"decoder: parameters {missing} are missing, {unknown} are unknown")
    for name, (_, leaf) in leaves.items():
        if parameters[name].shape != leaf.shape:
            raise ValueError(f"decoder: {name} is {parameters[name].shape}; this configuration gives it {leaf.shape}")
    # 3. The values under the paths of the module.
    flat = [(path, leaf.replace(parameters[name])) for name, (path, leaf) in leaves.items()]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def by_name(traits: DecoderTraits, state: nnx.State) -> dict[str, Array]:
    """Parameters, or their gradients, by their names in the torch state dict; a tied weight has both names."""
    named = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    return named | {HEAD: named[EMBEDDING]} if traits.is_tied else named


def _check_tied(parameters: Mapping[str, Any]) -> None:
    """ValueError if the head differs from the embedding; tracers have no values and are not compared."""
    from jax.core import Tracer

    embedding, head = parameters.get(EMBEDDING), parameters[HEAD]
    if embedding is None or isinstance(head, Tracer) or isinstance(embedding, Tracer):
        return
    if embedding.shape != head.shape or not bool((embedding == head).all()):
        raise ValueError(f"decoder: {HEAD} is tied to {EMBEDDING} and differs from it; pass one, or the same twice")


def linear(x: Float[Array, "b s i"], weight: Float[Array, "o i"]) -> Float[Array, "b s o"]:
    """A linear layer without a bias, whether ranks shard the sequence or the features."""
    return x @ weight.T


def lora_weight(
    weight: Float[Array, "o i"],
    a: Float[Array, "r i"],
    b: Float[Array, "o r"],
    scaling: float,
    magnitude: Float[Array, " o"] | None = None,
) -> Float[Array, "o i"]:
    """W + s B A. With a magnitude its rows are divided by their norms, which have no gradient, and multiplied by it.

    Source: arXiv 2106.09685 (LoRA), 2402.09353 (DoRA).
    """
    adapted = weight + scaling * b @ a
    if magnitude is None:
        return adapted
    norms = jax.lax.stop_gradient(jnp.sqrt((adapted**2).sum(1)))
    return (magnitude / norms)[:, None] * adapted


Arrays = Mapping[str, Array]
Batch = tuple[Int[Array, "b s"], Int[Array, "b s"]]


class Step(NamedTuple):
    """Loss, logits and gradients of one batch; gradients by torch name."""

    loss: Float[Array, ""]
    logits: Float[Array, "b s v"]
    gradients: dict[str, Array]


class Trained(NamedTuple):
    """All training steps, and the final parameters."""

    steps: list[Step]
    parameters: dict[str, Array]


def mean_loss(logits: Float[Array, "b s v"], targets: Int[Array, "b s"]) -> Float[Array, ""]:
    """Mean of the token losses over the tokens with a target."""
    is_valid = (targets >= 0) & (targets < logits.shape[-1])
    return -logprob(logits, targets).sum() / is_valid.sum().astype(logits.dtype)


def step(traits: DecoderTraits, arrays: Arrays, ids: Int[Array, "b s"], targets: Int[Array, "b s"]) -> Step:
    """Loss, logits and the gradient of every parameter."""

    def loss_and_logits(decoder: Decoder) -> tuple[Float[Array, ""], Float[Array, "b s v"]]:
        logits = decoder(ids)
        return mean_loss(logits, targets), logits

    differentiated = nnx.value_and_grad(loss_and_logits, has_aux=True)
    (loss, logits), gradients = differentiated(from_state_dict(traits, arrays))
    return Step(loss, logits, by_name(traits, gradients))


compiled_step = jax.jit(step, static_argnums=0)


def train(
    config: Any,
    arrays: Arrays,
    batches: Sequence[Batch],
    *,
    lr: float = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    compiled: Callable[..., Step] = compiled_step,
) -> Trained:
    """One AdamW step for each batch. `compiled` is `step`, compiled or not."""
    traits = config if isinstance(config, DecoderTraits) else DecoderTraits.of(config)
    optimizer = optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    # AdamW is element-wise, so all parameters can be one vector, which keeps the compiled program small.
    vector, named = ravel_pytree(by_name(traits, nnx.state(from_state_dict(traits, arrays))))
    state, steps = optimizer.init(vector), []
    for ids, targets in batches:
        result = compiled(traits, named(vector), jnp.asarray(ids), jnp.asarray(targets))
        steps.append(result)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
            updates, state = optimizer.update(ravel_pytree(result.gradients)[0], state, vector)
            vector = jnp.asarray(optax.apply_updates(vector, updates))
    return Trained(steps, named(vector))
