"""Head-parallel attention: one all_to_all exchanges heads for positions, each rank attends, and another undoes it.

The cp rank is `ring_rank * a + heads_rank`. The a ranks of one `heads` group exchange heads, so that each then holds
some heads at the positions of all of them. With usp the positions of one group are a shard of the sequence, and the
groups exchange keys around the ring; with Ulysses they are the full sequence.
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
            the cost of the ring, with the rows of `a` ranks and the heads of one.
    """
    a = heads.size()
    group_rows = _group_rows(layout, a)
    # 1. q, k and v side by side for each receiving rank, so that one all_to_all exchanges all three.
    head_shards = [_by_receiving_rank(x, a) for x in (q, k, v)]
    widths = [x.shape[2] for x in head_shards]
    received = all_to_all(torch.cat(head_shards, 2).flatten(1, 2), heads, split_dim=HEAD, concat_dim=ROW)
    # 2. Rows arrive rank by rank; a block schedule needs those of each sequence in order.
    group_q, group_k, group_v = received[:, :, group_rows.in_order].split(widths, HEAD)
    transfer = key_transfer(group_rows.layout, causal, window)
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.unflatten(0, (a, -1))[heads.rank()])
    out = blockwise_attention(group_q, group_k, group_v, transfer.schedule, transport_of(transfer.route, ring), options)
    # 3. Back into the order of ranks, and each rank's rows back to it.
    return all_to_all(out[:, :, group_rows.by_rank], heads, split_dim=ROW, concat_dim=HEAD)


@dataclass(frozen=True)
class _GroupRows:
    """The rows of a heads group: `in_order` permutes them from rank order to the order of positions, `by_rank` back."""

    layout: TokenLayout
    in_order: Int64[Tensor, " rows"]
    by_rank: Int64[Tensor, " rows"]


def _group_rows(layout: TokenLayout, a: int) -> _GroupRows:
    """The rows of a heads group and their layout over the ring, cached with the layout."""
    return layout.derived(("group_rows", a), lambda: _build_group_rows(layout, a))


def _build_group_rows(layout: TokenLayout, a: int) -> _GroupRows:
    # The same tokens over the ring alone, whose ranks hold what the a consecutive cp ranks of a group hold together.
    inner = layout.rebind(layout.cp_size // a, layout.cp_rank // a)
    in_order = layout.index[inner.cp_rank * a : (inner.cp_rank + 1) * a].flatten().argsort()
    return _GroupRows(inner, in_order, in_order.argsort())


def _by_receiving_rank(x: Heads, a: int) -> Float[Tensor, "b a h_rank s p"]:
    """Heads grouped by the rank that receives them; a KV head that several ranks need is repeated for each."""
    if x.shape[1] % a:
        x = x.unsqueeze(2).expand(-1, -1, a // x.shape[1], -1, -1).flatten(1, 2)
    return x.unflatten(1, (a, -1))
