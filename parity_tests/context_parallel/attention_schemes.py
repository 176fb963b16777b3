"""What the schemes of attention have in common: rules that come as data, and what each exchange costs.

Causal and window are inputs, so that one compiled reference serves all of them.
"""

from __future__ import annotations

from shardproof import Cost, integers, values

DTYPES = ("float32", "bfloat16", "float64")
HEADS = {**dict.fromkeys(("q", "k"), values("normal", "ties", "zeros")), "v": values("normal", "ties")}
# Causal is 1 or 2. A window is n + 2 for n above 0, else none, as half of the cases have: each rule meets each often.
# Of one key alone the gradients of q and k are 0, and what is computed is rounding.
RULES = {"causal": integers(0, 2), "window": integers(-7, 7)}
# Stored in the dtype and used again: the softmax, a block's output, the output of all, the product of the cotangent and
# the values, its softmax gradient, and a block's gradients.
ROUNDINGS = 6
SCALE = 0.375  # of all schemes whose rules are data; others leave it out


def rules(causal, window):
    """The rules as production takes them."""
    return {"causal": bool(causal), "window": int(window) + 2 if window > 0 else None, "scale": SCALE}


def ring_cost(c, hops, rows, heads):
    """`hops` shifts of K and V of `rows` rows, back as many and as many of their gradients."""
    sent = hops * c.b * rows * 2 * heads * c.p * c.itemsize
    back = sent + hops * c.b * rows * 2 * heads * c.p * c.accumulator_itemsize
    ends = ("send", "recv") if hops else ()
    return Cost(forward=dict.fromkeys(ends, (hops, sent)), backward=dict.fromkeys(ends, (2 * hops, back)))


def gathered_cost(c, rows):
    keys = c.b * rows * 2 * c.g * c.p
    return Cost(
        forward={"all_gather": (1, keys * c.itemsize)},
        backward={
            "all_gather": (1, keys * c.itemsize),
            "reduce_scatter": (1, c.cp * keys * c.accumulator_itemsize),
        },
    )


def heads_cost(c, a, rows):
    mixed = {"all_to_all": (2, c.b * rows * c.p * c.itemsize * (2 * c.h + 2 * max(c.g, a)))}
    return Cost(forward=mixed, backward=mixed)


def cost(c):
    """Of the exchange among the options of a case."""
    rows = c.s // c.cp
    if c.exchange == "ring":
        return ring_cost(c, c.cp - 1, rows, c.g)
    return gathered_cost(c, rows) if c.exchange == "all_gather" else heads_cost(c, c.cp, rows)


def usp_cost(c):
    a, m, rows = c.heads, c.ring, c.s // (c.heads * c.ring)
    mixed, ring = heads_cost(c, a, rows), ring_cost(c, m - 1, a * rows, max(c.g, a) // a)
    return Cost(forward={**mixed.forward, **ring.forward}, backward={**mixed.backward, **ring.backward})
