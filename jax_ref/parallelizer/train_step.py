"""A training step on whole arrays: the loss, the gradient of every parameter, AdamW.

    loss = -(1/N) sum log p[target],   N tokens with a target;   w = w - lr * (m / (sqrt(v) + eps) + decay * w)

A target outside the vocabulary, such as -100, is none. m and v are the bias-corrected means of g and g^2.
Source: arXiv 1711.05101 (AdamW).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from jax_ref.parallelizer.decoder import Decoder, by_name, from_state_dict
from jax_ref.parallelizer.traits import DecoderTraits
from jax_ref.vocab_parallel import logprob

Arrays = Mapping[str, Array]
Batch = tuple[Int[Array, "b s"], Int[Array, "b s"]]


class Step(NamedTuple):
    """What one batch gives: gradients under the torch names."""

    loss: Float[Array, ""]
    logits: Float[Array, "b s v"]
    gradients: dict[str, Array]


class Trained(NamedTuple):
    """Each step, and the parameters at the end."""

    steps: list[Step]
    parameters: dict[str, Array]


def mean_loss(logits: Float[Array, "b s v"], targets: Int[Array, "b s"]) -> Float[Array, ""]:
    """Mean of the token losses over the tokens with a target."""
    known = (targets >= 0) & (targets < logits.shape[-1])
    return -logprob(logits, targets).sum() / known.sum().astype(logits.dtype)


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
    """One AdamW step for each batch. `compiled` is `step`, as it is or compiled in another way."""
    traits = config if isinstance(config, DecoderTraits) else DecoderTraits.of(config)
    optimizer = optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    # Each number is updated by itself: all of them as one vector are one small program.
    vector, named = ravel_pytree(by_name(traits, nnx.state(from_state_dict(traits, arrays))))
    state, steps = optimizer.init(vector), []
    for ids, targets in batches:
        taken = compiled(traits, named(vector), jnp.asarray(ids), jnp.asarray(targets))
        steps.append(taken)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
            updates, state = optimizer.update(ravel_pytree(taken.gradients)[0], state, vector)
            vector = jnp.asarray(optax.apply_updates(vector, updates))
    return Trained(steps, named(vector))
