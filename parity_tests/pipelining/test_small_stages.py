"""Parity of small decoders in stages: ties of every kind, and shapes that are told again."""

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_ref.pipelining import reference
from parity_tests.pipelining import tied_decoder
from parity_tests.pipelining.sharded_decoder import NAMES as DECODER_NAMES
from parity_tests.pipelining.tied_decoder import LAYERS, RATE, SHARED_LAYERS, TIES
from parity_tests.pipelining.written_orders import fill_and_drain, with_late_messages
from shardproof import CaseSpec, scheme, token_below, values
from shardproof.engines.engines import run
from torch_impl.pipelining import Times, simulate
from torch_impl.pipelining.order import Action
from torch_impl.pipelining.schedule import build_pipeline_schedule

LOOPED = ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
FLOATS = ("target", "table", "layers", "norm")
REPLICATED = {"token": "b s", "target": "b s v pp=R"}


def loss(token, target, embedding, layers, norm, head):
    x = embedding[token]
    for layer in layers:
        x = x + jnp.tanh(x @ layer)
    return (((x * norm[None, None]) @ head.T - target) ** 2).sum() / 2


def of_tied(token, target, table, layers, norm, tie, steps):
    """Both copies have the same gradient; a tie between layers adds up both layers. Each step moves the weights."""
    one, other = SHARED_LAYERS

    def of_leaves(embedding, head, layers, norm):
        return loss(token, target, embedding, layers, norm, head)

    def of_step(table, layers, norm):
        value, (of_first, of_second, of_layers, of_norm) = jax.value_and_grad(of_leaves, (0, 1, 2, 3))(
            table, table, layers, norm
        )
        if tie == "absent":
            of_second = jnp.zeros_like(of_second)
        both = jnp.zeros_like(table) if tie == "frozen" else of_first + of_second
        if tie == "two":
            of_layers = of_layers.at[jnp.array(SHARED_LAYERS)].set(of_layers[one] + of_layers[other])
        return value, (both, of_layers, of_norm)

    weights = table, layers.at[other].set(layers[one]) if tie == "two" else layers, norm
    sums, value = tuple(map(jnp.zeros_like, weights)), 0.0
    for _ in range(steps):  # gradients are added, and all that is added so far moves the weights
        of_this, gradients = of_step(*weights)
        sums = tuple(map(jnp.add, sums, gradients))
        weights = tuple(weight - RATE * each for weight, each in zip(weights, sums, strict=True))
        value = value + of_this / steps
    both, of_layers, _ = (each / (len(token) * steps) for each in sums)
    distinct = table.size + norm.size + layers.size - (layers[0].size if tie == "two" else 0)
    zero = jnp.zeros((), table.dtype)
    return {
        "loss": value, "first": both, "second": both, "of_layers": of_layers, "count": zero + distinct, "astray": zero,
    }  # fmt: skip


@scheme(
    reference=of_tied,
    mesh={"pp": (1, 2, 4)},
    inputs={**REPLICATED, "table": "v d pp=R", "layers": "l d d2 pp=R", "norm": "d pp=R"},
    outputs={
        "loss": "pp=P", "first": "v d pp=P", "second": "v d pp=P", "of_layers": "l d d2 pp=P", "count": "pp=P",
        "astray": "pp=P",
    },
    dims={"b": (4,), "s": (3,), "v": (5,), "d": (3,), "d2": "d", "l": (LAYERS,)},
    draw={"token": token_below("v"), **dict.fromkeys(FLOATS, values("normal"))},
    nograd=FLOATS,
    options={"tie": TIES, "steps": (2, 1)},
    rank_options={"name": LOOPED},
    dtypes=("float64", "float32"),
    reduction=("b", "s", "v", "d"),
    roundings=40,
)  # fmt: skip
def ties_in_stages(mesh, token, target, table, layers, norm, tie, steps, name):
    outputs = tied_decoder.tied_gradients(mesh, tie, steps, name, token, target, table, layers, norm)
    return dict(zip(("loss", "first", "second", "of_layers", "count", "astray"), outputs, strict=True))


def of_steps(token, target, embedding, layers, norm, head):
    """Four steps: two of the whole length, two without its last position; their gradients are added."""

    def of_weights(embedding, layers, norm, head):
        whole = loss(token, target, embedding, layers, norm, head)
        shorter = loss(token[:, :-1], target[:, :-1], embedding, layers, norm, head)
        return 2 * whole + 2 * shorter, jnp.stack([whole, whole, shorter, shorter])

    gradients, losses = jax.grad(of_weights, (0, 1, 2, 3), has_aux=True)(embedding, layers, norm, head)
    return {"losses": losses, **dict(zip(("d_embedding", "d_layers", "d_norm", "d_head"), gradients, strict=True))}


@scheme(
    reference=of_steps,
    mesh={"pp": (1, 2)},
    inputs={**REPLICATED, "embedding": "v d pp=R", "layers": "l d d2 pp=R", "norm": "d pp=R", "head": "v d pp=R"},
    outputs={
        "losses": "steps pp=P", "d_embedding": "v d pp=P", "d_layers": "l d d2 pp=P", "d_norm": "d pp=P",
        "d_head": "v d pp=P",
    },
    dims={"b": (4,), "s": (3, 4), "v": (5,), "d": (3,), "d2": "d", "l": (5,), "steps": (4,)},
    draw={
        "token": token_below("v"), **dict.fromkeys(("target", "embedding", "layers", "norm", "head"), values("normal")),
    },
    nograd=("target", "embedding", "layers", "norm", "head"),
    rank_options={"name": LOOPED},
    dtypes=("float64", "float32"),
    reduction=("b", "s", "v", "d"),
    roundings=40,
)  # fmt: skip
def shapes_told_again(mesh, token, target, embedding, layers, norm, head, name):
    weights = (embedding, *layers.unbind(), norm, head)
    losses, gradients = tied_decoder.told_again(mesh, name, token, target, weights)
    first, *of_layers, of_norm, of_head = (
        gradients.get(leaf, torch.zeros_like(weight)) for leaf, weight in zip(DECODER_NAMES, weights, strict=True)
    )
    outputs = (losses, first, torch.stack(of_layers), of_norm, of_head)
    return dict(zip(("losses", "d_embedding", "d_layers", "d_norm", "d_head"), outputs, strict=True))


@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble"])
def test_a_tie_of_which_one_copy_is_frozen_is_an_error_on_both_ranks(name):
    """A rank that sent a gradient to one that expects none would wait for ever."""

    def body(mesh, case):
        values = [torch.ones(size) for size in ((5, 3), (LAYERS, 3, 3), (3,))]
        stages = tied_decoder.in_stages(mesh, tied_decoder.tied("one", *values), name)
        for stage in stages:
            if stage.is_first:
                stage.submod.embed_tokens.weight.requires_grad_(False)
        schedule = build_pipeline_schedule(None, name, 1, 4, stages, tied_decoder.loss_of)
        with pytest.raises(ValueError, match=r"on stage 0 is frozen, 'lm_head.weight' on stage \d is trained; freeze"):
            tied_decoder.stepped(schedule, stages, torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2, 5))
        return True

    # The two stages of a v are on rank 0; rank 1 has no copy, and steps.
    ranks = 1 if name == "ZBVZeroBubble" else 2
    assert run(body, CaseSpec("ties", {"pp": ranks})).results == (True,) * ranks


MICROBATCHES = 3
DURATIONS = ("forward", "backward")


def placed_over(pp, style):
    """Two stages on each rank, dealt out in turn or turning round."""
    return [*range(pp), *(reversed(range(pp)) if style == "v" else range(pp))]


def written(pp, style, sends):
    order = fill_and_drain(placed_over(pp, style), MICROBATCHES)
    return order if sends == "none" else with_late_messages(order, placed_over(pp, style), late=sends == "late")


def of_timeline(forward, backward, p2p, mesh, style, sends):
    placed = placed_over(mesh["pp"], style)
    positive = [jnp.abs(x) for x in (forward, backward, p2p)]
    ends, busy = reference.timeline(written(mesh["pp"], style, sends), placed, *positive)
    ends_of = [
        jnp.stack([jnp.stack([ends[stage, kind, m] for m in range(MICROBATCHES)]) for stage in range(len(placed))])
        for kind in "FB"
    ]
    makespan = jnp.stack(ends_of).max()
    idle = makespan - jnp.stack(busy)
    return {"of_forward": ends_of[0], "of_backward": ends_of[1], "idle": idle, "bubble": idle / makespan}


@scheme(
    reference=of_timeline,
    mesh={"pp": (1, 2, 3, 4)},
    inputs={**dict.fromkeys(DURATIONS, "k pp=I"), "p2p": "pp=I"},
    outputs={"of_forward": "k m pp=I", "of_backward": "k m pp=I", "idle": "r/pp", "bubble": "r/pp"},
    dims={"k": "2*pp", "m": (MICROBATCHES,), "r": "pp"},
    draw=dict.fromkeys((*DURATIONS, "p2p"), values("normal")),
    nograd=(*DURATIONS, "p2p"),
    options={"style": ("loop", "v"), "sends": ("none", "at once", "late")},
    dtypes=("float64",),
    roundings=20,
)
def simulated_messages(mesh, forward, backward, p2p, style, sends):
    """When each forward and backward ends, and how long each rank waits; messages take time between two ranks."""
    pp = mesh.size("pp")
    placed = placed_over(pp, style)
    order = [[Action(*action) for action in row] for row in written(pp, style, sends)]
    f, b = (x.abs().tolist() for x in (forward, backward))
    timeline = simulate(order, placed, Times(f=f, i=b, w=0.0, p2p=p2p.abs().item()))
    ends = torch.zeros(2, len(placed), MICROBATCHES, dtype=forward.dtype)
    for event in timeline.events:
        ends["FB".index(event.action.kind), event.action.stage, event.action.microbatch] = event.stop
    ends = ends.to(forward.device)
    of_rank = (forward.new_tensor([each[mesh.rank("pp")]]) for each in (timeline.idle, timeline.bubble))
    return dict(zip(("of_forward", "of_backward", "idle", "bubble"), (*ends, *of_rank), strict=True))
