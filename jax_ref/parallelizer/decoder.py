"""A decoder of the Llama kind: Llama, Qwen2, Qwen3, Mistral, Gemma, Phi3.

    x = E[ids];   x = x + attention(norm(x));   x = x + mlp(norm(x));   logits = norm(x) H^T,  H = E where tied

Parameters have the names of the Hugging Face model; what a family does differently stands in its traits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_ref.parallelizer.attention import Attention
from jax_ref.parallelizer.layers import Embedding, GatedMLP, Linear, RMSNorm
from jax_ref.parallelizer.traits import DecoderTraits

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and around it a residual."""

    def __init__(self, traits: DecoderTraits, window: int | None):
        self.input_layernorm = RMSNorm(traits.width, traits.eps, traits.norm_offset)
        self.self_attn = Attention(traits, window)
        self.post_attention_layernorm = RMSNorm(traits.width, traits.eps, traits.norm_offset)
        self.mlp = GatedMLP(traits)

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nnx.Module):
    """All but the head."""

    def __init__(self, traits: DecoderTraits):
        self.embed_tokens = Embedding(traits.vocab, traits.width, traits.padding_id)
        self.layers = nnx.List([DecoderLayer(traits, window) for window in traits.windows])
        self.norm = RMSNorm(traits.width, traits.eps, traits.norm_offset)


class Decoder(nnx.Module):
    """Logits of token ids. `embed`, each of `layers`, and `head` are its stages, in this order."""

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
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return jnp.einsum("bsd,vd->bsv", self.model.norm(x), weight[...])


def from_state_dict(config: Any, arrays: Mapping[str, Any]) -> Decoder:
    """The decoder of a configuration with these parameters, by their torch names.

    A tied head may be left out. Errors: ValueError for a name that is missing or unknown, for another shape, for a
    tied head that is not the embedding.
    """
    traits = config if isinstance(config, DecoderTraits) else DecoderTraits.of(config)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(traits)))
    leaves = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    given = {name: jnp.asarray(array) for name, array in arrays.items()}
    if traits.is_tied and HEAD in given:
        _check_tied(given)
        del given[HEAD]
    missing, unknown = sorted(set(leaves) - set(given)), sorted(set(given) - set(leaves))
    if missing or unknown:
        raise ValueError(f"decoder: parameters {missing} are missing, {unknown} are unknown")
    for name, (_, leaf) in leaves.items():
        if given[name].shape != leaf.shape:
            raise ValueError(f"decoder: {name} is {given[name].shape}; this configuration gives it {leaf.shape}")
    return nnx.merge(graph, nnx.from_flat_state([(path, leaf.replace(given[n])) for n, (path, leaf) in leaves.items()]))


def by_name(traits: DecoderTraits, state: nnx.State) -> dict[str, Array]:
    """Parameters, or their gradients, under the names of the torch state dict; what is tied, under both."""
    found = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    return found | {HEAD: found[EMBEDDING]} if traits.is_tied else found


def _check_tied(given: Mapping[str, Any]) -> None:
    """A head that is another array than the embedding; tracers are taken at their word."""
    from jax.core import Tracer

    embedding, head = given.get(EMBEDDING), given[HEAD]
    if embedding is None or isinstance(head, Tracer) or isinstance(embedding, Tracer):
        return
    if embedding.shape != head.shape or not bool((embedding == head).all()):
        raise ValueError(f"decoder: {HEAD} is tied to {EMBEDDING} and differs from it; pass one, or the same twice")
