"""A hybrid language model on whole packed streams."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_ref.models.config import Config
from jax_ref.models.layer import LAYERS, Embed, Norm


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
        """Every row has the same documents: j at `padded[j]:padded[j + 1]`, of which `real` says how much is real."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, padded, real)
        x = self.norm(x)
        if self.lm_head is None:
            return jnp.einsum("bsd,vd->bsv", x, self.embed_tokens.embedding[...])
        return self.lm_head(x)
