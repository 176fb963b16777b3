"""The costs of attention over cp: products, all-gathers of keys, exchanges of heads, and messages by listed pairs."""

import math
from typing import Any

import numpy as np

from shardproof.declare.declared import Cost

MAX_POSITIONS, MAX_RANKS = 4096, 64  # limits, because pairs are listed one by one


def products(c, causal=False):
    """The floating-point operations of one rank: for each (query, key) pair two products forward, five backward.

    `causal`, or a scheme's option `causal`, halves the pairs; a mask that is passed as data does not.
    """
    pairs = c.s * (c.s + 1) // 2 if causal or c.options.get("causal") else c.s * c.s
    ranks = math.prod(c.mesh.get(axis, 1) for axis in ("cp", "ring", "heads"))
    product = 2 * c.b * c.h * pairs * c.p // ranks
    return 2 * product, 5 * product


def gathered_cost(c, rows):
    keys = c.b * rows * 2 * c.g * c.p
    return Cost(
        forward={"all_gather": (1, keys * c.itemsize)},
        backward={
            "all_gather": (1, keys * c.itemsize),
            "reduce_scatter": (1, c.cp * keys * c.accumulator_itemsize),
        },
        products=products(c),
    )


def heads_cost(c, a, rows, axis="cp"):
    mixed = {f"all_to_all/{axis}": (2, c.b * rows * c.p * c.itemsize * (2 * c.h + 2 * max(c.g, a)))}
    return Cost(forward=mixed, backward=mixed, products=products(c))


def visible_pairs(size, causal, window, padded=None, real=None, prefix_of=()):
    """`[i, j]`: whether the query at position i of a stream sees the key at position j, by listing all pairs.

    Sequence j continues sequence `prefix_of[j]`: it also sees that sequence's keys, and so on along the prefixes.
    """
    if size > MAX_POSITIONS:
        raise ValueError(f"pairs of {size:,} positions are not listed; the limit is {MAX_POSITIONS:,}")
    padded = np.array([0, size]) if padded is None else np.asarray(padded)
    real = padded if real is None else np.asarray(real)
    token = np.arange(size)
    sequence = (token[:, None] >= padded[None, 1:]).sum(1)
    is_real = token - padded[sequence] < np.diff(real, append=real[-1])[sequence]
    ahead = token[:, None] - token[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & is_real[:, None] & is_real[None, :]
    seen &= (ahead >= 0) | (not causal)
    seen = seen if window is None else seen & (abs(ahead) < window)
    for j in range(len(prefix_of)):
        _add_prefixes(seen, j, padded, np.diff(real), prefix_of, window)
    return seen


def _add_prefixes(seen, j, padded, real, prefix_of, window):
    """Mark the pairs of sequence j's queries with the keys of its prefix, of the prefix's prefix, and so on."""
    between, i = 0, prefix_of[j]
    while i >= 0:
        for query in range(real[j]):
            for key in range(real[i]):
                if window is None or query + between + real[i] - key < window:
                    seen[padded[j] + query, padded[i] + key] = True
        between, i = between + real[i], prefix_of[i]


def needed_keys(positions, visible):
    """`[r][s]`: the positions of rank s that a query of another rank r sees."""
    n = len(positions)
    return [
        [set(keys[visible[np.ix_(positions[r], keys)].any(0)]) if r != s else set() for s, keys in enumerate(positions)]
        for r in range(n)
    ]


class Traffic:
    """Messages of each rank, counted one by one: op -> [calls, rows]."""

    def __init__(self, n):
        self.keys = [{} for _ in range(n)]
        self.gradients = [{} for _ in range(n)]

    def peak_rows(self, ops):
        """The most rows of keys that one rank sends, plus the most rows of gradients."""
        return sum(
            max(sum(table.get(op, (0, 0))[1] for op in ops) for table in of) for of in (self.keys, self.gradients)
        )


def record(table, op, rows):
    calls, before = table.get(op, (0, 0))
    table[op] = (calls + 1, before + rows)


def around_the_ring(needed):
    """Keys go from their source to the last rank that needs them; their gradient follows and returns to the source."""
    n, sent = len(needed), Traffic(len(needed))
    for source in range(n):
        rows = len(set().union(*(needed[r][source] for r in range(n))))
        takers = [step for step in range(1, n) if needed[(source + step) % n][source]]
        for step in range(1, max(takers, default=0) + 1):
            before, here, after = ((source + step + i) % n for i in (-1, 0, 1))
            record(sent.keys[before], "send", rows)
            record(sent.keys[here], "recv", rows)
            target = source if step == takers[-1] else after
            record(sent.gradients[here], "send", rows)
            record(sent.gradients[target], "recv", rows)
    return sent


def as_a_halo(needed):
    """One all_to_all sends each rank the keys that it needs, and another returns their gradients."""
    n, sent = len(needed), Traffic(len(needed))
    for rank in range(n):
        record(sent.keys[rank], "all_to_all", sum(len(needed[other][rank]) for other in range(n)))
        record(sent.gradients[rank], "all_to_all", sum(len(needed[rank][other]) for other in range(n)))
    return sent


def cheaper(needed):
    """The ring, unless the halo's peak is a quarter lower, or a rank would have no message before step 1."""
    n, ring, halo = len(needed), around_the_ring(needed), as_a_halo(needed)
    sources = {s for s in range(n) if any(needed[r][s] for r in range(n))}
    idle = [r for r in range(n) if r not in sources and (r - 1) % n not in sources]
    if not sources:
        return ring
    return halo if idle or 4 * halo.peak_rows(["all_to_all"]) <= 3 * ring.peak_rows(["send"]) else ring


def key_costs(c, positions, visible, heads, products=None, axis="cp"):
    """The cost of each rank for sending K and V of `heads` heads over `axis`."""
    if len(positions) > MAX_RANKS:
        raise ValueError(f"messages of {len(positions):,} ranks are not listed; the limit is {MAX_RANKS}")
    sent = cheaper(needed_keys(positions, visible))
    row = 2 * c.b * heads * c.p

    def in_bytes(table, itemsize):
        return {f"{op}/{axis}": (calls, rows * row * itemsize) for op, (calls, rows) in table.items()}

    costs = []
    for keys, gradients in zip(sent.keys, sent.gradients, strict=True):
        forward = in_bytes(keys, c.itemsize)
        costs.append(Cost(forward, added(forward, in_bytes(gradients, c.accumulator_itemsize)), products))
    return costs


def added(one: Any, other: Any) -> dict[str, Any]:
    """The sum of two costs: calls and bytes by op."""
    return {op: tuple(map(sum, zip(one.get(op, (0, 0)), other.get(op, (0, 0)), strict=True))) for op in {*one, *other}}
