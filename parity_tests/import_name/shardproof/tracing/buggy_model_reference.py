"""The buggy model's reference, unsharded in flax; the weights and the batches of both."""

from pydoc_data.topics import topics

import jax
import numpy as np
from flax import nnx

from jax_ref.models import Embed, Norm
from shardproof.tracing.buggy_model import HIDDEN, VOCAB, D


class FullBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = Norm(D, 1e-5)
        self.gate, self.up = (nnx.Linear(D, HIDDEN, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(HIDDEN, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        n = self.norm(x)
        return x + self.down(jax.nn.silu(self.gate(n)) * self.up(n))


class FullModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = Embed(VOCAB, D)
        self.lower, self.upper = FullBlock(rngs), FullBlock(rngs)
        self.norm = Norm(D, 1e-5)
        self.head = nnx.Linear(D, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.norm(self.upper(self.lower(self.embed(ids)))))


def full_model(weights):
    """The flax model with weights by PyTorch's names: a kernel is a transposed weight."""
    model = nnx.eval_shape(lambda: FullModel(nnx.Rngs(0)))
    for name, weight in weights.items():
        module = model
        for part in name.split(".")[:-1]:
            module = getattr(module, part)
        if isinstance(module, nnx.Linear):
            module.kernel = nnx.Param(weight.T)
        elif isinstance(module, Embed):
            module.embedding = nnx.Param(weight)
        else:
            module.weight = nnx.Param(weight)
    return model


def drawn_weights():
    draw = np.random.default_rng(0).standard_normal
    weights = {"embed.weight": draw((VOCAB, D)), "norm.weight": np.ones(D), "head.weight": draw((VOCAB, D)) / 4}
    for name in ("lower", "upper"):
        weights |= {f"{name}.norm.weight": np.ones(D), f"{name}.down.weight": draw((D, HIDDEN)) / 4}
        weights |= {f"{name}.{part}.weight": draw((HIDDEN, D)) / 4 for part in ("gate", "up")}
    return weights


TEXT = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore"), np.uint8)


def batch(step):
    """Eight passages of 32 bytes, and the next byte of each."""
    at = np.random.default_rng(step).integers(0, len(TEXT) - 33, size=(8, 1)) + np.arange(33)
    return TEXT[at[:, :-1]].astype(np.int64), TEXT[at[:, 1:]].astype(np.int64)
