"""References that several projects share: linear layers, losses of tokens, attention. Written from their formulas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def identity(x: Any) -> Any:
    """The reference of a call that moves an array and computes nothing."""
    return x


def linear(x: Any, weight: Any) -> Any:
    """x [..., i] and weight [o, i]: [..., o]."""
    return x @ weight.T


def token_losses(logits: Any, target: Any, ignore: int = -100) -> Any:
    """The cross entropy of each token, zero where the target is `ignore`."""
    safe = jnp.where(target == ignore, 0, target)
    picked = jnp.take_along_axis(logits, safe[..., None], -1)[..., 0]
    return jnp.where(target == ignore, 0.0, jax.nn.logsumexp(logits, -1) - picked)


def mean_token_loss(logits: Any, target: Any, ignore: int = -100) -> Any:
    """The mean over the targets that are not `ignore`."""
    losses = token_losses(logits, target, ignore)
    return losses.sum() / (target != ignore).sum().astype(losses.dtype)


def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Softmax attention of [b, s, h, d]; with fewer heads of k and v, each serves a group of q's."""
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / jnp.sqrt(float(q.shape[-1]))
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool)), scores, -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)
