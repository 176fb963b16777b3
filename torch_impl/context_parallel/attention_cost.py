"""The bytes that each exchange of attention sends, in closed form, and the exchange that sends the fewest.

Bytes are those that one rank sends to other ranks, forward and backward; every rank sends the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch_impl.context_parallel.kinds import Window
from torch_impl.contract import PositiveInt, contract
from torch_impl.layouts.divisibility import indivisible

FUNCTION = "context_parallel.attention_bytes"
LayoutName = Literal["contiguous", "dual_chunk_swap", "packed", "ragged", "striped"]
RULE_OF = {"packed": "dual_chunk_swap"}  # packed shards each sequence by this rule, so their sum obeys it, too


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends with one `exchange`, `forward` and `backward`.

    `heads_size` is a, the number of ranks that exchange heads (usp: the inner dim of the mesh).
    """

    exchange: str
    heads_size: int
    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Forward and backward together."""
        return self.forward + self.backward


@contract(FUNCTION)
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
    """The bytes of each exchange that supports these shapes, ring first; usp once for each way to write n = a * m.

        q "b h s/cp:LAYOUT p", k, v "b hk s/cp:LAYOUT p"   with s global rows, n = cp_size

    With kv = 2 * hk * p * e, e = itemsize, t = s / n rows a rank, f = max(e, 4) for gradients of keys:

        ring        b (n-1) t kv                                  b (n-1) t kv (1 + f / e)
        all_gather  the same                                      the same
        ulysses     b (n-1)/n t p e (2 h + 2 max(hk, n))          the same
        usp         ulysses of a and ring of m with kv max(hk, a) / hk, over the a t rows of a group

    A causal window over contiguous rows makes ceil((window - 1) / t) hops of the ring, if fewer. Ulysses needs
    h % a == 0 and hk % a == 0 or a % hk == 0, usp a layout that is not striped; ragged rows are for all_gather alone.

    >>> [(t.exchange, t.total) for t in attention_bytes(b=1, s=8, h=4, hk=2, p=1, cp_size=2, itemsize=2)]
    [('ring', 128), ('all_gather', 128), ('ulysses', 96)]

    Errors: ValueError for a size below 1, query heads that are not a multiple of KV heads, a window below 1, an unknown
            layout or one that cannot shard s; TypeError for a size or window that is not an int, or a causal that is
            not a bool.
    """
    _check_shapes({"s": s, "h": h, "hk": hk, "cp_size": cp_size}, layout)
    rows, gradient_itemsize, n = -(-s // cp_size), max(itemsize, 4), cp_size
    numbers_per_head = 2 * p * b * rows  # of K and V on one rank

    def key_bytes(hops: int, heads: int) -> tuple[int, int]:  # of a ring, forward and backward
        numbers = hops * numbers_per_head * heads
        return numbers * itemsize, numbers * (itemsize + gradient_itemsize)

    def head_bytes(a: int) -> int:  # of the two all_to_alls over a ranks, in either direction
        return (a - 1) * numbers_per_head * (h + max(hk, a)) * itemsize // a

    # 1. Exchanges of keys: around the ring as many hops as the window reaches back, as in the block schedule.
    window_limits_hops = layout == "contiguous" and causal and window is not None
    hops = min(n - 1, -(-((window or 1) - 1) // rows)) if window_limits_hops else n - 1
    traffic = [] if layout == "ragged" else [Traffic("ring", 1, *key_bytes(hops, hk))]
    traffic.append(Traffic("all_gather", 1, *key_bytes(n - 1, hk)))
    # 2. Exchanges of heads, over every number of ranks that the heads can be sharded over.
    head_group_sizes = [a for a in range(1, n + 1) if n % a == 0 and h % a == 0 and (hk % a == 0 or a % hk == 0)]
    for a in head_group_sizes if layout != "ragged" else ():
        if a == n:
            traffic.append(Traffic("ulysses", a, head_bytes(a), head_bytes(a)))
        elif a > 1 and layout != "striped":
            hops_of_ring = min(n // a - 1, -(-((window or 1) - 1) // (a * rows))) if window_limits_hops else n // a - 1
            forward, backward = key_bytes(hops_of_ring, max(hk, a))  # a times the rows, an a-th of the heads
            traffic.append(Traffic("usp", a, head_bytes(a) + forward, head_bytes(a) + backward))
    return traffic


def _check_shapes(sizes: dict[str, int], layout: str) -> None:
    """ValueError unless the KV heads divide the query heads and the layout can shard the length."""
    if sizes["h"] % sizes["hk"]:
        heads, kv_heads = sizes["h"], sizes["hk"]
        raise ValueError(f"{FUNCTION}: h={heads} query heads cannot share hk={kv_heads} KV heads (needs a multiple)")
    s, n = sizes["s"], sizes["cp_size"]
    if n > 1 and (reason := indivisible("s", s, "cp", n, RULE_OF.get(layout, layout))):
        raise ValueError(f"{FUNCTION}: {reason}")


def fewest_bytes(**shapes: Any) -> Traffic:
    """The exchange that sends the fewest bytes, forward and backward; of equals, the first of `attention_bytes`.

    `shapes` are the keywords of `attention_bytes`.

    Errors: those of `attention_bytes`.

    >>> fewest_bytes(b=1, s=8, h=4, hk=2, p=1, cp_size=2, itemsize=2).exchange
    'ulysses'
    """
    return min(attention_bytes(**shapes), key=lambda traffic: traffic.total)
