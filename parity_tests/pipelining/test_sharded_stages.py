"""Parity of pipelines whose stages FSDP shards, for every way to give a schedule, the stages and their shapes."""

import jax.numpy as jnp
import pytest

from parity_tests.pipelining.sharded_decoder import sharded_loss
from shardproof import scheme, token_below, values
from torch_impl.pipelining.named_schedules import RULES

LAYERS = 5
WEIGHTS = {"embedding": "v d pp=R dp=I", "layers": "l d e pp=R dp=I", "norm": "d pp=R dp=I", "head": "v d pp=R dp=I"}


def loss_for_two_lengths(token, target, embedding, layers, norm, head):
    def loss(token, target):
        x = embedding[token]
        for layer in layers:
            x = x + jnp.tanh(x @ layer)
        return (((x * norm[None, None]) @ head.T - target) ** 2).sum() / 2

    both = loss(token, target) + loss(token[:, :-1], target[:, :-1])
    return {"loss": both, "astray": jnp.zeros((), both.dtype)}


@scheme(
    reference=loss_for_two_lengths,
    mesh={"pp": (1, 2), "dp": (1, 2)},
    inputs={"token": "b/dp s", "target": "b/dp s v pp=I", **WEIGHTS},
    outputs={"loss": "pp=P dp=P", "astray": "pp=P dp=P"},
    dims={"b": (8,), "s": (3, 4), "v": (6,), "d": (3,), "e": (3,), "l": (LAYERS,)},
    draw={"token": token_below("v"), **dict.fromkeys(("target", *WEIGHTS), values("normal"))},
    nograd=("target",),
    rank_options={
        "name": tuple(RULES),
        "source": (
            "name",
            "file",
            "complete",
            "complete but reductions",
            "complete but some reductions",
            "both",
        ),
        "names": ("typed", "divided"),
        "shape": ("in place", "returned", "wrapped"),
        "is_wide": (False, True),
        "reduction": ("at the end", "once", "each"),
        "has_seq_len": (True, False),
    },
    dtypes=("float64", "float32"),
    reduction=("b", "s", "v", "d", "e"),
    roundings=40,
)
@pytest.mark.cases(8)
def sharded_stages(
    mesh, token, target, embedding, layers, norm, head, name, source, names, shape, is_wide, reduction, has_seq_len
):
    weights = (embedding, *layers.unbind(), norm, head)
    return sharded_loss(mesh, token, target, weights, name, source, names, shape, is_wide, reduction, has_seq_len)
