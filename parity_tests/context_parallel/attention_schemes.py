"""Parts that the schemes of attention share: rules that come as data, and the cost of each exchange.

Causal and window are inputs, so that one compiled reference serves all of them.
"""

from __future__ import annotations

import jax_ref.layouts
from shardproof import Cost, integers, values
from shardproof.cost.attention import gathered_cost, heads_cost, key_costs, products, visible_pairs

DTYPES = ("float32", "bfloat16", "float64")
HEADS = {**dict.fromkeys(("q", "k"), values("normal", "ties", "zeros")), "v": values("normal", "ties")}
# Attention is causal for 1 and 2. A window has n + 2 positions for n above 0, and is absent in the other half of the
# cases, so both rules often meet. It has 3 or more: with one key the gradients of q and k would be rounding errors.
RULES = {"causal": integers(0, 2), "window": integers(-7, 7)}
# Stored in the dtype and used again: the softmax, a block's output, the output of all, the product of the cotangent and
# the values, its softmax gradient, and a block's gradients.
ROUNDINGS = 6
SCALE = 0.375  # in all schemes with rules as data; other schemes leave it out


def rules(causal, window):
    """The rules as production takes them."""
    return {**dict(zip(("causal", "window"), limits(causal, window), strict=True)), "scale": SCALE}


def can_share_heads(c):
    """Whether all ranks of a case get equally many query heads, and equally many KV heads or a copy of one."""
    ranks = c.cp if c.options.get("exchange") == "ulysses" else c.mesh.get("heads", 1)
    return c.h % ranks == 0 and (c.g % ranks == 0 or ranks % c.g == 0)


def limits(causal, window):
    """Causal and window of RULES as the rules of attention."""
    return bool(causal.item()), window.item() + 2 if window.item() > 0 else None


def exchange_cost(c, positions, rules, padded=None, real=None, prefix_of=()):
    """The cost of the exchange in a case's options; rank r has `positions[r]`."""
    if c.exchange == "ring":
        return key_costs(c, positions, visible_pairs(c.s, *rules, padded, real, prefix_of), c.g, products(c))
    rows = max(map(len, positions))
    return gathered_cost(c, rows) if c.exchange == "all_gather" else heads_cost(c, c.cp, rows)


def dense_cost(layout):
    """The cost function for one sequence in the named layout, with the inputs of RULES."""

    def cost(c, causal, window):
        return exchange_cost(c, getattr(jax_ref.layouts, layout)(c.s, c.cp), limits(causal, window))

    return cost


def packed_cost(layout):
    """The cost function for packed sequences in the named layout."""

    def cost(c, padded, real, causal, window):
        return exchange_cost(c, stream(layout, c.s, c.cp, padded), limits(causal, window), padded, real)

    return cost


def stream(layout, size, world, padded):
    """The positions of packed sequences in the named layout."""
    offsets = (padded.tolist(),) if layout == "packed" else ()
    return getattr(jax_ref.layouts, layout)(size, world, *offsets)


def usp_cost(c, causal, window, positions=None, padded=None, real=None):
    """The cost of USP. Rank r of the ring has `positions[r]`; all ranks of a heads group send the same."""
    positions = jax_ref.layouts.dual_chunk_swap(c.s, c.ring) if positions is None else positions
    return cost_over_two_axes(c, positions, visible_pairs(c.s, *limits(causal, window), padded, real))


def cost_over_two_axes(c, positions, visible):
    """The cost of USP for a table of visible pairs."""
    a, rows = c.heads, c.s // (c.heads * c.ring)
    mixed = heads_cost(c, a, rows, "heads")
    ring = key_costs(c, positions, visible, max(c.g, a) // a, products(c), "ring")
    by_ring = [
        Cost({**mixed.forward, **keys.forward}, {**mixed.backward, **keys.backward}, products(c)) for keys in ring
    ]
    return [cost for cost in by_ring for _ in range(a)]
