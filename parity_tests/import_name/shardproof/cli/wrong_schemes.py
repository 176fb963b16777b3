"""Three mistakes that a forward check on one shape passes or cannot name, for `shardproof tour` to catch.

Each is a small complete scheme with one mistake, and the words that its explanation must contain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import torch

from jax_ref.vocab_parallel import logprob
from shardproof.declaration import Scheme, scheme
from shardproof.declare.draws import token_below, values
from torch_impl.collectives import all_gather, all_reduce, all_reduce_max


@dataclass(frozen=True)
class WrongScheme:
    """A wrong scheme: its mistake, words that its report must have, and sizes that show the mistake well."""

    scheme: Scheme
    mistake: str
    expect: str
    sizes: Mapping[str, Any] = field(default_factory=dict)


def _projected(hidden, weight):
    return jnp.einsum("bsd,dv->bsv", hidden, weight)


@scheme(
    reference=_projected,
    mesh={"tp": (4,)},
    inputs={"hidden": "b s d tp=I", "weight": "d v/tp"},
    outputs="b s v/tp",
    draw={"hidden": values("normal"), "weight": values("normal")},
)
def projection_without_backward_sum(mesh, hidden, weight):
    # Each rank's gradient of hidden covers its own columns of v, and nothing adds the ranks' gradients up.
    return torch.einsum("bsd,dv->bsv", hidden, weight)


@scheme(
    reference=logprob,
    mesh={"tp": (4,)},
    inputs={"logits": "b s v/tp", "target": "b s"},
    outputs="b s tp=I",
    draw={"logits": values("normal"), "target": token_below("v")},
    reduction=("v",),
)
def logprob_with_shifted_shards(mesh, logits, target):
    z, group = logits.float(), mesh["tp"]
    first = mesh.rank("tp") * z.shape[-1] + 1  # one too many
    peak = all_reduce_max(z.amax(-1), group)
    total = all_reduce(torch.exp(z - peak[..., None]).sum(-1), group)
    is_local = target[..., None] == first + torch.arange(z.shape[-1])
    return all_reduce(torch.where(is_local, z, 0.0).sum(-1), group) - peak - torch.log(total)


@scheme(
    reference=lambda x: x,
    mesh={"cp": (4,)},
    inputs={"x": "b s/cp:dual_chunk_swap"},
    outputs="b s cp=R",
    draw={"x": values("normal")},
)
def gather_that_keeps_the_layout(mesh, x):
    return all_gather(x, mesh["cp"], out="R", dim=1)  # in rank order, which is not the order of s


WRONG_SCHEMES = (
    WrongScheme(
        projection_without_backward_sum,
        "a projection sharded over tp whose backward does not add up the ranks' gradients",
        "missing a sum over tp",
        {"b": 1, "s": 2, "d": 3, "v": 8},
    ),
    WrongScheme(
        logprob_with_shifted_shards,
        "a vocabulary shard whose first id is one too large",
        "offset is wrong by 1",
        {"b": 2, "s": 8, "v": 16},
    ),
    WrongScheme(
        gather_that_keeps_the_layout,
        "a sequence gathered over cp and left in dual_chunk_swap order",
        "a layout is not undone",
        {"b": 1, "s": 16},
    ),
)
