"""Parity of AutoPipeline: its settings, steps of two lengths, and the parameters that it counts."""

import jax
import jax.numpy as jnp
import pytest
import torch

from parity_tests.pipelining import automatic
from parity_tests.pipelining.sharded_decoder import MICROBATCHES
from parity_tests.pipelining.test_reference import ROUNDINGS
from parity_tests.pipelining.test_small_stages import loss
from shardproof import scheme, token_below, values

LOOPED = ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
WEIGHTS = ("embedding", "layers", "norm", "head")
FLOATS = ("target", *WEIGHTS)


def of_last_step(token, target, embedding, layers, norm, head, told, is_scaled):
    """Losses of both steps, and the second one's gradients, divided by the micro-batches if they are scaled."""
    shorter = slice(None, None if told == "never" else -1)
    weights = embedding, layers, norm, head
    second, gradients = jax.value_and_grad(
        lambda *weights: loss(token[:, shorter], target[:, shorter], *weights), (0, 1, 3)
    )(*weights)
    of_embedding, of_layers, of_head = (each / (len(token) if is_scaled else 1) for each in gradients)
    trained = embedding.size + layers.size + head.size
    return {
        "losses": jnp.stack([loss(token, target, *weights), second]),
        "d_embedding": of_embedding, "d_layers": of_layers, "d_head": of_head,
        "counts": jnp.asarray([trained + norm.size, trained, len(layers)], norm.dtype),
    }  # fmt: skip


@scheme(
    reference=of_last_step,
    mesh={"pp": (1, 2)},
    inputs={
        "token": "b s", "target": "b s v pp=R",
        "embedding": "v d pp=R", "layers": "l d d2 pp=R", "norm": "d pp=R", "head": "v d pp=R",
    },
    outputs={
        "losses": "steps pp=P", "d_embedding": "v d pp=P", "d_layers": "l d d2 pp=P", "d_head": "v d pp=P",
        "counts": "facts pp=P",
    },
    dims={"b": (MICROBATCHES,), "s": (3, 4), "v": (5,), "d": (3,), "d2": "d", "l": (5,), "steps": (2,), "facts": (3,)},
    draw={"token": token_below("v"), **dict.fromkeys(FLOATS, values("normal"))},
    nograd=FLOATS,
    options={"told": automatic.TOLD, "is_scaled": (False, True)},
    rank_options={"name": LOOPED, "source": ("name", "file", "spreadsheet"), "is_wide": (False, True)},
    dtypes=("float64", "float32"),
    reduction=("b", "s", "v", "d"),
    roundings=ROUNDINGS,
)  # fmt: skip
@pytest.mark.cases(6)
def built_by_settings(mesh, token, target, embedding, layers, norm, head, told, is_scaled, name, source, is_wide):
    weights = (embedding, *layers.unbind(), norm, head)
    losses, gradients, counts = automatic.stepped(mesh, name, source, told, is_wide, is_scaled, token, target, weights)
    first, *of_layers, _, of_head = gradients
    outputs = (losses, first, torch.stack(of_layers), of_head, counts)
    return dict(zip(("losses", "d_embedding", "d_layers", "d_head", "counts"), outputs, strict=True))
