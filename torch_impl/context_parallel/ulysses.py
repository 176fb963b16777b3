"""Heads exchanged for positions: each rank gets some heads of all positions, attends, and gives the rows back.

Rank `ring_rank * a + heads_rank` holds its positions. The a ranks of one `heads` group give each other heads, so that
each then holds the positions of all of them; what is left of the sequence is cut over the ring (usp), or nothing is
(Ulysses).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_to_all
from torch_impl.context_parallel.block_schedule import schedule_of
from torch_impl.context_parallel.blockwise_attention import blockwise_attention
from torch_impl.context_parallel.key_exchange import Ring
from torch_impl.layouts.token_layout import TokenLayout

Heads = Float[Tensor, "b h s p"]
KVHeads = Float[Tensor, "b hk s p"]
HEAD, ROW = 1, 2


# V -> V
def head_parallel_attention(
    q: Heads,
    k: KVHeads,
    v: KVHeads,
    layout: TokenLayout,
    heads: ProcessGroup,
    ring: ProcessGroup,
    causal: bool,
    window: int | None,
    scale: float,
) -> Heads:
    """Attention with heads cut over `heads` and what is left of the positions over `ring`.

        q "b h s/cp p", k, v "b hk s/cp p"   ->   "b h s/cp p"

    Where there are fewer KV heads than ranks of `heads`, each is sent to several.

    Cost:   forward 1 all_to_all of q, k and v together and 1 of the output, backward the same, in their dtype; besides
            what the ring costs, with the rows of `a` ranks and the heads of one.
    """
    a = heads.size()
    joined = _joined(layout, a)
    held = [_for_each_rank(x, a) for x in (q, k, v)]
    widths = [x.shape[2] for x in held]
    mixed = all_to_all(torch.cat(held, 2).flatten(1, 2), heads, split_dim=HEAD, concat_dim=ROW)
    whole_q, whole_k, whole_v = mixed[:, :, joined.in_order].split(widths, HEAD)
    out = blockwise_attention(whole_q, whole_k, whole_v, schedule_of(joined.layout, causal, window), Ring(ring), scale)
    return all_to_all(out[:, :, joined.by_rank], heads, split_dim=ROW, concat_dim=HEAD)


@dataclass(frozen=True)
class _Joined:
    """What `a` ranks hold together: rows by rank, which `in_order` sorts by position and `by_rank` puts back."""

    layout: TokenLayout
    in_order: Int64[Tensor, " rows"]
    by_rank: Int64[Tensor, " rows"]


def _joined(layout: TokenLayout, a: int) -> _Joined:
    """The cut over the ring. All layers that share a layout share it: a memo, which changes no result."""
    return layout.derived(("joined", a), lambda: _built(layout, a))


def _built(layout: TokenLayout, a: int) -> _Joined:
    inner = layout.rebind(layout.cp_size // a, layout.cp_rank // a)
    in_order = layout.index[inner.cp_rank * a : (inner.cp_rank + 1) * a].flatten().argsort()
    return _Joined(inner, in_order, in_order.argsort())


def _for_each_rank(x: Heads, a: int) -> Float[Tensor, "b a share s p"]:
    """Heads by the rank that gets them; a KV head that several ranks need is there once for each."""
    if x.shape[1] % a:
        x = x.unsqueeze(2).expand(-1, -1, a // x.shape[1], -1, -1).flatten(1, 2)
    return x.unflatten(1, (a, -1))
