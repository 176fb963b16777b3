"""Parity with the reference of pipelining: gradients of any schedule, and costs of schedules in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_ref.pipelining import reference
from parity_tests.pipelining.residual import stepped
from shardproof import scheme, values
from torch_impl.pipelining import Timeline, Times, schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.named_schedules import RULES

# Each layer stores twice, forward and backward, and a loss and a gradient are sums over all of them.
ROUNDINGS = 40
MICROBATCHES, LAYERS = (8, 3, 4, 6), 8  # every schedule takes 8 over 1 to 4 ranks, and some take fewer


def reference_loss(parameters, x, target):
    def layer(x, weights):
        w1, w2 = weights
        return x + jnp.tanh(x @ w1) @ w2, None

    y, _ = jax.lax.scan(layer, x, parameters)
    return ((y - target) ** 2).sum() / 2


def accumulate(x, target, w1, w2):
    losses, (g1, g2) = reference.accumulate(reference_loss, (w1, w2), list(zip(x, target, strict=True)), divisor=len(x))
    return {"losses": jnp.stack(losses), "w1": g1, "w2": g2, "astray": jnp.zeros(len(x), x.dtype)}


@pytest.mark.parametrize("name", RULES)
def test_every_schedule_takes_eight_micro_batches(name):
    assert all(RULES[name].accepts(8, p) for p in (1, 2, 3, 4))


@scheme(
    reference=accumulate,
    mesh={"pp": (1, 2, 3, 4)},
    inputs={"x": "m b d pp=R", "target": "m b d pp=R", "w1": "l d e pp=R", "w2": "l e d pp=R"},
    outputs={"losses": "m pp=P", "w1": "l d e pp=P", "w2": "l e d pp=P", "astray": "m pp=P"},
    dims={"m": MICROBATCHES, "b": (2,), "d": (3,), "e": (4,), "l": (LAYERS,)},
    draw=dict.fromkeys(("x", "target", "w1", "w2"), values("normal")),
    nograd=("x", "target", "w1", "w2"),
    rank_options={"name": tuple(RULES), "source": ("name", "file")},
    dtypes=("float64", "float32"),
    assume=lambda case: RULES[case.name].accepts(case.m, case.pp),
    reduction=("m", "b", "l", "d", "e"),
    roundings=ROUNDINGS,
    # torch 2.11 compares the strides of a stage's inputs, and rejects a view's.
    excluded_conditions=("autocast", "strided") if torch.__version__.startswith("2.11.") else ("autocast",),
)
@pytest.mark.cases(30)
def pipelined(mesh, x, target, w1, w2, name, source):
    return stepped(mesh, x, target, w1, w2, name, source)


@pytest.mark.slow
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


EXACT = reference.FILL_AND_DRAIN
TIMES = ((1, 1, 1), (2, 3, 5))
# (name, p, n, v, times); the last three schedules are in closed form for equal times alone
SIZES = tuple(
    (name, p, rounds * p, RULES[name].stages or 2, times)
    for name in RULES
    for p, rounds in ((1, 3), (2, 2), (4, 2), (3, 3))
    for times in (TIMES if name in EXACT else TIMES[:1])
)


def by_formula(name, p, n, v, times):
    idle, busy = reference.idle(name, p, n, v, *times), n * v * sum(times)
    return {
        "idle": [idle] * p,
        "busy": [busy] * p,
        "bubble": [idle / (idle + busy)] * p,
        "live": [reference.live_chunks(name, p, n, v, rank) for rank in range(p)] if name in EXACT else [],
        "makespan": idle + busy,
    }


def simulation_costs(name, p, n, v, times):
    run = simulate(schedule_order(name, p, n, v), stage_to_rank(p, p * v, RULES[name].style), Times(*times))
    return {
        "idle": list(run.idle),
        "busy": list(run.busy),
        "bubble": list(run.bubble),
        "live": list(run.peak_live) if name in EXACT else [],
        "makespan": run.makespan,
    }


@pytest.mark.parametrize(("name", "p", "n", "v", "times"), SIZES)
def test_costs_are_the_closed_forms(name, p, n, v, times):
    assert simulation_costs(name, p, n, v, times) == by_formula(name, p, n, v, times)


def test_an_empty_timeline_takes_no_time():
    assert Timeline((), (0,), 1).makespan == 0
