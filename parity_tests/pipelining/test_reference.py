"""Parity with the reference of pipelining: gradients of any schedule, and what schedules cost in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from jaxtyping import Int
from torch import Tensor

from jax_ref.pipelining import reference
from parity_tests.pipelining.residual import stepped
from shardproof import check, every_case, scheme, token_below, values
from torch_impl.pipelining import Times, schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.named_schedules import RULES

# Each layer stores twice, forward and backward, and a loss and a gradient are sums over all of them.
ROUNDINGS = 40
MICROBATCHES, LAYERS = 8, 8  # what every schedule takes over 1 to 4 ranks


def reference_loss(parameters, x, target):
    def layer(x, weights):
        w1, w2 = weights
        return x + jnp.tanh(x @ w1) @ w2, None

    y, _ = jax.lax.scan(layer, x, parameters)
    return ((y - target) ** 2).sum() / 2


def accumulated(x, target, w1, w2):
    losses, (g1, g2) = reference.accumulate(reference_loss, (w1, w2), list(zip(x, target, strict=True)), divisor=len(x))
    return {"losses": jnp.stack(losses), "w1": g1, "w2": g2, "astray": jnp.zeros(len(x), x.dtype)}


@scheme(
    reference=accumulated,
    mesh={"pp": (1, 2, 3, 4)},
    inputs={"x": "m b d pp=R", "target": "m b d pp=R", "w1": "l d e pp=R", "w2": "l e d pp=R"},
    outputs={"losses": "m pp=P", "w1": "l d e pp=P", "w2": "l e d pp=P", "astray": "m pp=P"},
    dims={"m": (MICROBATCHES,), "b": (2,), "d": (3,), "e": (4,), "l": (LAYERS,)},
    draw=dict.fromkeys(("x", "target", "w1", "w2"), values("normal")),
    nograd=("x", "target", "w1", "w2"),
    rank_options={"name": tuple(RULES), "source": ("name", "file")},
    dtypes=("float64", "float32"),
    reduction=("m", "b", "l", "d", "e"),
    roundings=ROUNDINGS,
)
def pipelined(mesh, x, target, w1, w2, name, source):
    return stepped(mesh, x, target, w1, w2, name, source)


@settings(max_examples=30)
@given(every_case(pipelined))
def test_parity(case):
    check(case)


@pytest.mark.parametrize("order", [range(4), (3, 1, 0, 2)])
def test_gradients_are_added_in_the_order_passed(order):
    """Micro-batches of different lengths, whose sum in another order has other bits."""
    source = np.random.default_rng(3)
    w = jnp.asarray(source.normal(size=3), jnp.float32)
    rows = [jnp.asarray(source.normal(size=(length, 3)), jnp.float32) for length in (2, 1, 3, 5)]
    losses, total = reference.accumulate(lambda w, x: ((x @ w) ** 2).sum(), w, [(x,) for x in rows], order, divisor=8)
    each = [jax.grad(lambda w, x: ((x @ w) ** 2).sum())(w, x) for x in rows]
    by_hand = each[order[0]]
    for m in order[1:]:
        by_hand = by_hand + each[m]
    assert (total == by_hand / 8).all()
    assert [float(loss) for loss in losses] == [float(((x @ w) ** 2).sum()) for x in rows]


RANKS = 4  # the most; what is compared has one column for each
EXACT = reference.FILL_AND_DRAIN
TIMES = ((1, 1, 1), (2, 3, 5))
# (name, p, n, v, times); the last three schedules are in closed form for equal times alone
SIZES = tuple(
    (name, p, rounds * p, RULES[name].stages or 2, times)
    for name in RULES
    for p, rounds in ((2, 2), (4, 2), (3, 3))
    for times in (TIMES if name in EXACT else TIMES[:1])
)


def row(of_ranks):
    return [*of_ranks, *[0] * (RANKS - len(of_ranks))]


def by_formula(ids):
    """Idle time of every rank, then live chunks, where these are in closed form."""
    idle = [row([reference.idle(name, p, n, v, *times)] * p) for name, p, n, v, times in SIZES]
    live = [
        row([reference.live_chunks(name, p, n, v, rank) for rank in range(p)] if name in EXACT else [])
        for name, p, n, v, _ in SIZES
    ]
    return jnp.asarray([*idle, *live], ids.dtype) + 0 * ids


@scheme(
    reference=by_formula,
    mesh={"pp": (1, 2, 4)},
    inputs={"ids": "k r/pp"},
    outputs="k r/pp",
    dims={"k": (2 * len(SIZES),), "r": (RANKS,)},
    draw={"ids": token_below("r")},
)
def cost_of_schedules(mesh, ids) -> Int[Tensor, "k r/pp"]:
    """Each rank fills in its own columns."""
    runs = [
        simulate(schedule_order(name, p, n, v), stage_to_rank(p, p * v, RULES[name].style), Times(*times))
        for name, p, n, v, times in SIZES
    ]
    rows = [row(run.idle) for run in runs]
    rows += [row(run.peak_live if name in EXACT else []) for run, (name, *_) in zip(runs, SIZES, strict=True)]
    return torch.tensor(rows, dtype=ids.dtype, device=ids.device)[:, mesh.global_ids("r")]


@settings(max_examples=3)
@given(every_case(cost_of_schedules))
def test_costs_are_the_closed_forms(case):
    check(case)
