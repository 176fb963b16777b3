"""A norm and a projection over sharded columns, in one collective."""

import jax
import jax.numpy as jnp
import torch
from hypothesis import given, settings

from shardproof import Cost, check, every_case, scheme, values
from torch_impl.collectives import all_reduce

EPS = 1e-5


def reference(x, g, w):
    mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
    return jnp.einsum("bsd,od->bso", g[None, None] * x * jax.lax.rsqrt(mean_square + EPS), w)


@scheme(
    reference=reference,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "b s d/tp", "g": "d/tp", "w": "o d/tp"},
    outputs="b s o tp=I",
    draw={name: values("normal", "ties") for name in ("x", "g", "w")},
    roundings=3,
    cost=lambda c: Cost(forward={"all_reduce": (1, 4 * c.b * c.s * (c.o + 1))}),
)
def norm_and_projection(mesh, x, g, w):
    wide = x.float()
    addends = torch.cat([(g.float() * wide) @ w.float().T, wide.square().sum(-1, keepdim=True)], -1)
    total = all_reduce(addends, mesh["tp"])
    mean_square = total[..., -1:] / (x.shape[-1] * mesh.size("tp"))
    return total[..., :-1] * torch.rsqrt(mean_square + EPS)


@settings(deadline=None, max_examples=20)  # the first case of a shape compiles the reference
@given(every_case(norm_and_projection))
def test_parity(case):
    check(case)
