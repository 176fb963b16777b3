"""The plain modules that styles are compared with: output and gradients, on full arrays.

Each takes the arguments of its scheme: the tensor that moves, a cotangent, and weights. The cotangent is multiplied by
the weights' sum, and the ranks add the same sum up in one, two or three backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from parity_tests.parallelizer.styled import EPS


def differentiated(
    forward: Callable[..., Any], moving: tuple[Any, ...], cotangent: Any, weights: Any, frozen: int | None = None
) -> Any:
    """The output, then the gradient of each of the moving, 0 of the one with the number `frozen`."""
    y, pullback = jax.vjp(forward, *moving)
    gradients = pullback(cotangent * weights.sum())
    return y, *(jnp.zeros_like(each) if number == frozen else each for number, each in enumerate(gradients))


def linear(x, weight, bias, cotangent, weights, is_frozen=False):
    frozen = 1 if is_frozen else None
    return differentiated(lambda x, w, b: x @ w.T + b[None], (x, weight, bias), cotangent, weights, frozen)


def gated(x, gate, up, down, bias, cotangent, weights, is_frozen=False):
    def forward(x, gate, up, down, bias):
        return jax.nn.silu(x @ gate.T) * (x @ up.T) @ down.T + bias[None]

    return differentiated(forward, (x, gate, up, down, bias), cotangent, weights, 3 if is_frozen else None)


def of_two_halves(left, right, weight, bias, cotangent, weights, is_frozen=False):
    def forward(left, right, weight, bias):
        return jnp.concatenate([left, right], -1) @ weight.T + bias[None]

    return differentiated(forward, (left, right, weight, bias), cotangent, weights, 2 if is_frozen else None)


def norm(x, weight, cotangent, weights, is_frozen=False):
    def forward(x, weight):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * weight[None, None]

    return differentiated(forward, (x, weight), cotangent, weights, 1 if is_frozen else None)


def lookup(weight, ids, cotangent, weights):
    return differentiated(lambda weight: weight[ids], (weight,), cotangent, weights)


def identity(x, cotangent, weights):
    return differentiated(lambda x: x, (x,), cotangent, weights)


def tied(weight, ids, cotangent, weights):
    """Logits of each id's own vector: the embedding is the head."""
    return differentiated(lambda weight: weight[ids] @ weight.T, (weight,), cotangent, weights)


def experts(x, router, gate, up, down, chosen, cotangent, weights, is_frozen=False):
    """Every expert for every token; expert e counts as much as the router gives it in this token's choices."""

    def forward(x, router, gate, up, down):
        hidden = jax.nn.silu(jnp.einsum("td,efd->tef", x, gate)) * jnp.einsum("td,efd->tef", x, up)
        every = jnp.einsum("tef,edf->ted", hidden, down)
        share = jnp.einsum("tk,tke->te", router, jax.nn.one_hot(chosen, gate.shape[0], dtype=x.dtype))
        return jnp.einsum("te,ted->td", share, every)

    return differentiated(forward, (x, router, gate, up, down), cotangent, weights, 4 if is_frozen else None)
