"""The layers that decoders are made of, with torch's names and orders of dims: weight is [out, in]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_ref.parallelizer.traits import DecoderTraits

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
    """Row `id` of the weight; the row of `padding_id` as a constant."""

    def __init__(self, vocab: int, width: int, padding_id: int | None):
        self.padding_id = padding_id
        self.weight = nnx.Param(jnp.zeros((vocab, width)))

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        rows = self.weight[...][ids]
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
    """(act(x Wg^T) * x Wu^T) Wd^T; Wg and Wu one above the other where the family fuses them."""

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
