"""Parity of schedules with pipelining.accumulate: a stack of layers in stages against the whole in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jax_ref.pipelining.accumulate import accumulate
from parity_tests import check, every_case, scheme, values
from parity_tests.pipelining.residual import stepped
from torch_impl.pipelining.rules import RULES

# Each layer stores twice, forward and backward, and a loss and a gradient are sums over all of them.
ROUNDINGS = 40
MICROBATCHES, LAYERS = 8, 8  # what every schedule takes over 1 to 4 ranks


def whole(parameters, x, target):
    def layer(x, weights):
        w1, w2 = weights
        return x + jnp.tanh(x @ w1) @ w2, None

    y, _ = jax.lax.scan(layer, x, parameters)
    return ((y - target) ** 2).sum() / 2


def reference(x, target, w1, w2):
    losses, (g1, g2) = accumulate(whole, (w1, w2), list(zip(x, target, strict=True)), divisor=len(x))
    return {"losses": jnp.stack(losses), "w1": g1, "w2": g2, "astray": jnp.zeros(len(x), x.dtype)}


@scheme(
    reference=reference,
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
def test_gradients_are_added_in_the_order_given(order):
    """Micro-batches of different lengths, whose sum in another order has other bits."""
    source = np.random.default_rng(3)
    w = jnp.asarray(source.normal(size=3), jnp.float32)
    rows = [jnp.asarray(source.normal(size=(length, 3)), jnp.float32) for length in (2, 1, 3, 5)]
    losses, total = accumulate(lambda w, x: ((x @ w) ** 2).sum(), w, [(x,) for x in rows], order, divisor=8)
    each = [jax.grad(lambda w, x: ((x @ w) ** 2).sum())(w, x) for x in rows]
    by_hand = each[order[0]]
    for m in order[1:]:
        by_hand = by_hand + each[m]
    assert (total == by_hand / 8).all()
    assert [float(loss) for loss in losses] == [float(((x @ w) ** 2).sum()) for x in rows]
