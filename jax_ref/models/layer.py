"""The two kinds of layers: attention with an MLP after it, and Mamba2. Each is between residuals, after a norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_ref.mamba import Mamba2
from jax_ref.models.attention import Attention
from jax_ref.models.config import Config


class Embed(nnx.Module):
    """A row of the table for each id. nnx.Embed would round the table to float32."""

    def __init__(self, vocab: int, width: int):
        self.embedding = nnx.Param(jnp.zeros((vocab, width)))

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        return self.embedding[...][ids]


class Norm(nnx.Module):
    """x over its root mean square, times a weight."""

    def __init__(self, width: int, eps: float):
        self.eps, self.weight = eps, nnx.Param(jnp.ones(width))

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
        return x / jnp.sqrt(mean_square + self.eps) * self.weight[...][None, None, :]


class Mlp(nnx.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        d, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nnx.Linear(d, wide, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(d, wide, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(wide, d, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionLayer(nnx.Module):
    """x + attention(norm(x)), then that + mlp(norm(that))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b s d"], padded: Int[Array, " n"], real: Int[Array, " n"]
    ) -> Float[Array, "b s d"]:
        x = x + self.self_attn(self.input_layernorm(x), padded, real)
        return x + self.mlp(self.post_attention_layernorm(x))


class MambaLayer(nnx.Module):
    """x + mamba(norm(x))."""

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
    ) -> Float[Array, "b s d"]:
        return x + self.mixer(self.input_layernorm(x), padded)


LAYERS = {"attention": AttentionLayer, "mamba": MambaLayer}
