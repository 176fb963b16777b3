"""Head-parallel attention: one all_to_all exchanges heads for positions, each rank attends, and another undoes it.

The mesh has two axes, `ring` (outer) and `heads` (inner): s/cp is s/ring/heads, and the cp rank is
`ring_rank * heads_size + heads_rank`. The ranks of one heads group exchange heads, "h s/ring/heads" ->
"h/heads s/ring". With usp s/ring is a shard of the sequence, and keys are exchanged over `ring`. With Ulysses all ranks
of cp are one heads group: s/ring is all of s, and no keys are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_to_all
from torch_impl.context_parallel.blockwise_attention import SoftmaxOptions, blockwise_attention
from torch_impl.context_parallel.key_routes import key_transfer
from torch_impl.context_parallel.kv_transport import transport_of
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
    options: SoftmaxOptions,
) -> Heads:
    """Attention with heads sharded over `heads` and positions over `ring`.

        q "b h s/cp p", k, v "b hk s/cp p"   ->   "b h s/cp p"

    With fewer KV heads than ranks of `heads`, each KV head is sent to several ranks.

    Cost:   forward 1 all_to_all of q, k and v together and 1 of the output, backward the same, in their dtype; and
            the cost of the ring, with the rows of a heads group and the heads of one rank.
    """
    heads_size = heads.size()
    group_rows = _group_rows(layout, heads_size)
    # 1. Put q, k and v side by side for each receiving rank, so that one all_to_all exchanges all three.
    head_shards = [_by_receiving_rank(x, heads_size) for x in (q, k, v)]
    widths = [x.shape[2] for x in head_shards]
    received = all_to_all(torch.cat(head_shards, 2).flatten(1, 2), heads, split_dim=HEAD, concat_dim=ROW)
    # 2. Rows arrive rank by rank; reorder them, because a block schedule needs each sequence's rows in order.
    group_q, group_k, group_v = received[:, :, group_rows.in_order].split(widths, HEAD)
    transfer = key_transfer(group_rows.layout, causal, window)
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.unflatten(0, (heads_size, -1))[heads.rank()])
    out = blockwise_attention(group_q, group_k, group_v, transfer.schedule, transport_of(transfer.route, ring), options)
    # 3. Restore rank order, and send each rank's rows back.
    return all_to_all(out[:, :, group_rows.by_rank], heads, split_dim=ROW, concat_dim=HEAD)


@dataclass(frozen=True)
class _GroupRows:
    """The rows of a heads group: `in_order` permutes them from rank order to position order, `by_rank` back."""

    layout: TokenLayout
    in_order: Int64[Tensor, " rows"]
    by_rank: Int64[Tensor, " rows"]


def _group_rows(layout: TokenLayout, heads_size: int) -> _GroupRows:
    """The rows of a heads group and their layout over the ring, cached with the layout."""
    return layout.cached(("group_rows", heads_size), lambda: _build_group_rows(layout, heads_size))


def _build_group_rows(layout: TokenLayout, heads_size: int) -> _GroupRows:
    # Lay out the same tokens over the ring only: a ring rank has the rows of a heads group, which is consecutive in cp.
    inner = layout.rebind(layout.cp_size // heads_size, layout.cp_rank // heads_size)
    in_order = layout.index[inner.cp_rank * heads_size : (inner.cp_rank + 1) * heads_size].flatten().argsort()
    return _GroupRows(inner, in_order, in_order.argsort())


def _by_receiving_rank(x: Heads, heads_size: int) -> Float[Tensor, "b heads_size h_rank s p"]:
    """Group heads by the receiving rank; a KV head that several ranks need is repeated for each."""
    if x.shape[1] % heads_size:
        x = x.unsqueeze(2).expand(-1, -1, heads_size // x.shape[1], -1, -1).flatten(1, 2)
    return x.unflatten(1, (heads_size, -1))
