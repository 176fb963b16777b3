"""The bytes that each exchange of attention sends, in closed form, and the exchange that sends the fewest.

Bytes are counted for one rank, forward and backward, as sent to other ranks. If ranks send different numbers of keys,
each direction counts the rank that sends most, so that forward and backward may count different ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add
from typing import Any, Literal

import torch

from torch_impl.context_parallel.key_routes import KeyTraffic, key_traffic
from torch_impl.context_parallel.kinds import Window
from torch_impl.contract import PositiveInt, Rejected, contract
from torch_impl.layouts.divisibility import indivisible
from torch_impl.layouts.token_layout import dense_layout

LayoutName = Literal["contiguous", "dual_chunk_swap", "packed", "ragged", "striped"]
RULE_OF = {"packed": "dual_chunk_swap"}  # packed shards each sequence by this rule, so their total obeys it too


@dataclass(frozen=True)
class Traffic:
    """The bytes that the busiest rank sends with one `exchange`, in `forward` and in `backward`.

    `heads_size` is the number of ranks that exchange heads (for usp the inner mesh axis, `heads`), 1 if none do.
    """

    exchange: str
    heads_size: int
    forward: int
    backward: int

    @property
    def total(self) -> int:
        """The bytes of forward and backward together."""
        return self.forward + self.backward


@contract
def attention_bytes(
    *,
    b: PositiveInt,
    s: PositiveInt,
    h: PositiveInt,
    hk: PositiveInt,
    p: PositiveInt,
    cp_size: PositiveInt,
    itemsize: PositiveInt,
    layout: LayoutName = "dual_chunk_swap",
    causal: bool = True,
    window: Window | None = None,
) -> list[Traffic]:
    """The bytes of each exchange that supports these shapes, ring first; usp once for each mesh of n = ring * heads.

        q "b h s/cp:LAYOUT p", k, v "b hk s/cp:LAYOUT p"   with s global rows, n = cp_size

    Let kv = 2 * hk * p * e, e = itemsize, t = s / n rows on each rank, f = max(e, 4) for gradients of keys, and for usp
    a = heads_size ranks of the mesh axis `heads` and m = n / a ranks of `ring`. Forward and backward:

        ring        b keys kv                                     b (keys + gradients f / e) kv
        all_gather  b (n-1) t kv                                  b (n-1) t kv (1 + f / e)
        ulysses     b (n-1)/n t p e (2 h + 2 max(hk, n))          the same
        usp         ulysses of a and ring of m with kv max(hk, a) / hk, over the a t rows of a group

    `keys` and `gradients` are one rank's rows by `key_traffic` for one sequence, at most (n-1) t each (see `Traffic`).
    Ulysses needs h % a == 0, and hk % a == 0 or a % hk == 0, with a = n; usp needs the same for its a, and no stripes.
    Ragged rows need ring or all_gather.

    >>> [(t.exchange, t.total) for t in attention_bytes(b=1, s=8, h=4, hk=2, p=1, cp_size=2, itemsize=2, causal=False)]
    [('ring', 128), ('all_gather', 128), ('ulysses', 96)]

    Errors: ValueError for a size below 1, query heads that are not a multiple of KV heads, a window below 1, a layout
            that is unknown or cannot shard s; TypeError for a size, a window or causal of a wrong type.
    """
    _check_shapes({"s": s, "h": h, "hk": hk, "cp_size": cp_size}, layout)
    rows, gradient_itemsize, n = -(-s // cp_size), max(itemsize, 4), cp_size
    numbers_per_head = 2 * p * b  # of K and V of one row

    def ring_bytes(ranks: int, heads: int) -> tuple[int, int]:
        numbers = numbers_per_head * heads
        rows_sent = _ring_rows(layout, s, ranks, causal, window)
        return _peak_bytes(rows_sent, numbers * itemsize, numbers * gradient_itemsize)

    def head_bytes(a: int) -> int:  # of the two all_to_alls over a ranks, in either direction
        return (a - 1) * rows * numbers_per_head * (h + max(hk, a)) * itemsize // a

    # 1. Exchanges of keys: a ring sends the keys that the layout needs, an all_gather sends all.
    gathered = (n - 1) * rows * numbers_per_head * hk
    traffic = [Traffic("ring", 1, *ring_bytes(n, hk))]
    traffic.append(Traffic("all_gather", 1, gathered * itemsize, gathered * (itemsize + gradient_itemsize)))
    # 2. Exchanges of heads, for every number of ranks that can shard the heads.
    head_group_sizes = [a for a in range(1, n + 1) if n % a == 0 and h % a == 0 and (hk % a == 0 or a % hk == 0)]
    for a in head_group_sizes if layout != "ragged" else ():
        if a == n:
            traffic.append(Traffic("ulysses", a, head_bytes(a), head_bytes(a)))
        elif a > 1 and layout != "striped":
            forward, backward = ring_bytes(n // a, max(hk, a) // a)  # a times the rows, an a-th of the heads
            traffic.append(Traffic("usp", a, head_bytes(a) + forward, head_bytes(a) + backward))
    return traffic


def _peak_bytes(rows_sent: KeyTraffic, key_row: int, gradient_row: int) -> tuple[int, int]:
    """The most bytes that one rank sends, forward and backward, with `key_row` and `gradient_row` bytes per row."""
    keys = [count * key_row for count in rows_sent.keys]
    gradients = [count * gradient_row for count in rows_sent.gradients]
    return max(keys), max(map(add, keys, gradients))


def _ring_rows(layout: str, s: int, ranks: int, causal: bool, window: int | None) -> KeyTraffic:
    """The rows of keys that each rank of a ring sends for one sequence of `s` tokens."""
    one_sequence = dense_layout(RULE_OF.get(layout, layout), s, ranks, 0, torch.device("cpu"))
    return key_traffic(one_sequence, causal=causal, window=window)[0]


def _check_shapes(sizes: dict[str, int], layout: str) -> None:
    """ValueError unless the KV heads divide the query heads and the layout can shard the length."""
    if sizes["h"] % sizes["hk"]:
        heads, kv_heads = sizes["h"], sizes["hk"]
        raise Rejected(f"h={heads} query heads cannot share hk={kv_heads} KV heads (needs a multiple)")
    s, n = sizes["s"], sizes["cp_size"]
    if n > 1 and (reason := indivisible("s", s, "cp", n, RULE_OF.get(layout, layout))):
        raise Rejected(reason)


def fewest_bytes(**shapes: Any) -> Traffic:
    """The exchange that sends the fewest bytes, forward and backward; ties go to the first in `attention_bytes`.

    `shapes` are the keywords of `attention_bytes`.

    Errors: as `attention_bytes`.

    >>> fewest_bytes(b=1, s=8, h=4, hk=2, p=1, cp_size=2, itemsize=2).exchange
    'ulysses'
    """
    return min(attention_bytes(**shapes), key=lambda traffic: traffic.total)
