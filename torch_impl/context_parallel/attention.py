"""Attention over a sequence that is sharded over cp, with its tokens in any order.

Rank r has the queries, keys and values of the positions that the layout assigns to it, and returns their outputs. The
*exchange* decides how ranks see the keys of other ranks: `ring` and `all_gather` move keys (`key_routes`,
`kv_transport`), `ulysses` moves heads by all-to-alls, and `usp` does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives.reductions import as_replicated
from torch_impl.context_parallel.block_schedule import BlockSchedule, schedule_of
from torch_impl.context_parallel.blockwise_attention import SoftmaxOptions, blockwise_attention
from torch_impl.context_parallel.key_routes import key_transfer
from torch_impl.context_parallel.kinds import ORDERS, ExchangeName, Layout, Scale, Window
from torch_impl.context_parallel.kv_transport import AllGather, KVTransport, transport_of
from torch_impl.context_parallel.ulysses import head_parallel_attention
from torch_impl.contract import Group, Mesh, Positive, Rejected, Sharded, contract, dtype_name
from torch_impl.layouts.divisibility import host_offsets, offsets_of, without_fill
from torch_impl.layouts.token_layout import TokenLayout, dense_layout

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# Gradient types: V -> V.
@contract
def context_parallel_attention(
    q: Sharded[Tensor, "b h s/cp:LAYOUT p"],
    k: Sharded[Tensor, "b hk s/cp:LAYOUT p"],
    v: Sharded[Tensor, "b hk s/cp:LAYOUT p"],
    *,
    mesh: Mesh | None = None,
    group: Group[ProcessGroup, "cp"] | None = None,
    layout: Layout,
    causal: bool = True,
    exchange: ExchangeName = "ring",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    window: Window | None = None,
    scale: Scale | None = None,
    softcap: Positive | None = None,
    sinks: Sharded[Tensor, "h cp=I"] | None = None,
) -> Sharded[Tensor, "b h s/cp:LAYOUT p"]:
    """Attention of this rank's queries over all keys of their sequences, on any rank.

    out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j];   query head g uses KV head g * hk // h

    Under tensor parallelism h and hk are the rank's own heads, h/tp and hk/tp.

    With `softcap` c the logits x of the softmax become c * tanh(x / c). With `sinks` each head's softmax has one more
    logit, for a key with value 0 that each query sees: it takes weight and adds nothing.

    Query i sees key j if both are real tokens of one sequence, j is not after i (`causal`), and they are less than
    `window` positions of the sequence apart. If the layout has `prefix_of`, a sequence can continue another one, its
    prefix: its queries also see the prefix's keys, as if the prefix stood right before it; the prefix's queries do not
    see the sequence. Padding has output 0 and gradient 0. `scale` is p ** -0.5 by default, and must be positive and
    finite: other values give NaN for hidden keys.

    `layout` is a TokenLayout, or contiguous, dual_chunk_swap or striped. `cu_seqlens` are the padded offsets of
    packed sequences in the global stream, for a batch of one, if the layout does not carry them; dual_chunk_swap then
    applies within each sequence. Pass `group` or `mesh`: a mesh has one axis, or for usp two, called `ring` (outer) and
    `heads` (inner) here, under any names. Then s/cp is s/ring/heads: cp rank = ring_rank * heads_size + heads_rank,
    where heads_size is the number of ranks of the axis `heads`. `exchange` is one of the four below.

    Cost:   with n ranks, forward; backward. Gradients of keys are sent in float32 or wider around a ring, in a halo and
            into a reduce_scatter. In the all_to_alls of ulysses and usp they are sent in k's dtype; if several ranks
            have a head, its gradients are rounded to that dtype before they are added.
        ring        K and V by n - 1 messages or fewer, or by 1 all_to_all (a halo) if `key_traffic` prefers it; the
                    same again, and as many messages or all_to_alls for the gradients of K and V. Only rows that a query
                    of another rank sees are sent: a document within one rank sends none.
        all_gather  1 all_gather of K and V; the same again, and 1 reduce_scatter of their gradients.
        ulysses     2 all_to_alls: q, k, v with max(hk, n) KV heads, and out; the same again.
        usp         the all_to_alls of ulysses over `heads`, and a ring over `ring`; the same again.
    `attention_bytes` gives the bytes. Saves q (a copy, if its last stride is not 1), a copy of k and v, the output
    and one number per query and head. The layout alone decides a rank's calls: gradients of keys are computed and sent
    even if only q requires a gradient, and every rank must run its backward. The gradient of `sinks` is summed over cp:
    1 all_reduce in backward, for usp 2 if `heads` has more than one rank. A softcap is computed by plain operations on
    every device.

    Errors: TypeError if group, mesh, causal, window, scale, softcap, sinks or offsets have a wrong type, or dtypes
            differ or are not float16, bfloat16, float32 or float64; ValueError for shapes that do not fit, query heads
            that are not a multiple of KV heads, an exchange that is unknown or cannot shard these heads or this layout,
            a window below 1, a scale or softcap that is not positive and finite, sinks on another device, invalid
            offsets or offsets that differ from the layout's, packed sequences in a batch of several rows, or a layout
            of other ranks.
    Source: arXiv 2310.01889 (ring), 2309.14509 (Ulysses), 2405.07719 (usp).
    """
    # 1. Check the properties of groups, heads and layout that the contract does not state.
    groups = _groups(mesh, group, exchange)
    _check_tensors(q, k, v, sinks)
    token_layout = _layout_of(layout, cu_seqlens, groups, q)
    if problem := _layout_problem(token_layout, groups, q) or _exchange_problem(exchange, groups, token_layout, q, k):
        raise Rejected(problem)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # 2. Exchange heads, and keys over the remaining ring; or exchange keys only.
    options = SoftmaxOptions(factor, softcap, None if sinks is None else _addend_gradients(sinks, groups))
    if exchange in ("ulysses", "usp"):
        return head_parallel_attention(q, k, v, token_layout, groups.heads, groups.ring, causal, window, options)
    schedule, transport = _key_exchange(exchange, token_layout, causal, window, groups.ring)
    return blockwise_attention(q, k, v, schedule, transport, options)


def _key_exchange(
    exchange: str, layout: TokenLayout, causal: bool, window: int | None, group: ProcessGroup
) -> tuple[BlockSchedule, KVTransport]:
    """The block schedule, and the transport of the keys."""
    if exchange == "all_gather":
        schedule = schedule_of(layout, causal, window)
        return schedule, AllGather(group, schedule.counts)
    transfer = key_transfer(layout, causal, window)
    return transfer.schedule, transport_of(transfer.route, group)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Errors: TypeError for dtypes, ValueError for heads or devices that do not fit together."""
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPES:
        dtypes, supported = ", ".join(map(dtype_name, (q, k, v))), "float16, bfloat16, float32, float64"
        raise Rejected(f"q, k, v are {dtypes}; pass one dtype of {supported}", TypeError)
    if problem := _head_problem(q, k):
        raise Rejected(problem)


@dataclass(frozen=True)
class CpGroups:
    """The groups of cp: ranks of `heads` exchange heads, ranks of `ring` exchange keys; `size` and `rank` are cp's.

    Only usp has two different groups; for every other exchange both are the group of cp.
    """

    ring: ProcessGroup
    heads: ProcessGroup
    size: int
    rank: int


def _groups(mesh: DeviceMesh | None, group: ProcessGroup | None, exchange: str) -> CpGroups:
    """The groups of an exchange, from a group or a mesh."""
    dims = 2 if exchange == "usp" else 1
    if mesh is None and group is not None:
        if dims == 2:
            raise Rejected("exchange='usp' needs a mesh of 2 dims, ring and heads; pass mesh")
        return CpGroups(group, group, group.size(), group.rank())
    if mesh is None or group is not None:
        given = "neither mesh nor group is" if mesh is None else "mesh and group are both"
        raise Rejected(f"{given} given; pass one of them")
    if mesh.ndim != dims:
        raise Rejected(f"mesh has ndim={mesh.ndim}, but exchange={exchange!r} needs ndim={dims}; pass such a mesh")
    ring, heads = mesh.get_group(0), mesh.get_group(dims - 1)
    if dims == 1:
        return CpGroups(ring, heads, ring.size(), ring.rank())
    # The ranks of a heads group are consecutive in cp; `ulysses._build_group_rows` relies on it.
    return CpGroups(ring, heads, ring.size() * heads.size(), ring.rank() * heads.size() + heads.rank())


def _head_problem(q: Tensor, k: Tensor) -> str | None:
    """A problem if p is 0, or if the query heads are not a multiple of the KV heads; else None."""
    if not q.shape[3]:
        return f"q is {list(q.shape)}; p must be at least 1"
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        return f"h={heads} query heads cannot share hk={kv_heads} KV heads (needs a multiple)"
    return None


def _addend_gradients(sinks: Tensor, groups: CpGroups) -> Tensor:
    """The sinks, with a gradient summed over all ranks of cp: each rank has the term of its queries and heads."""
    of_ring = as_replicated(sinks, groups.ring)
    # Only usp has a ring with fewer ranks than cp.
    return of_ring if groups.size == groups.ring.size() else as_replicated(of_ring, groups.heads)


def _layout_of(
    layout: TokenLayout | str, cu_seqlens: Tensor | Sequence[int] | None, groups: CpGroups, q: Tensor
) -> TokenLayout:
    """The layout on q's device. A name stands for a layout of the rows of all ranks together."""
    if isinstance(layout, str):
        token_layout = _layout_of_name(layout, cu_seqlens, groups, q.shape[2] * groups.size, q.device)
    else:
        token_layout = layout
        _check_same_offsets(layout, cu_seqlens)
    # Index arrays on another device are copied once for all layers.
    return token_layout if token_layout.index.device == q.device else _on_device(token_layout, q.device)


def _layout_problem(layout: TokenLayout, groups: CpGroups, q: Tensor) -> str | None:
    """Why a layout does not fit q's rows on this rank of this group, or None."""
    if (layout.cp_size, layout.cp_rank) != (groups.size, groups.rank):
        of_layout = f"the layout is for rank {layout.cp_rank} of cp={layout.cp_size}"
        return f"{of_layout}, this is rank {groups.rank} of cp={groups.size}; rebind it"
    rows, rows_here = q.shape[2], layout.counts[groups.rank]
    if rows != rows_here:
        shared = f"the layout gives this rank {rows_here} of {layout.total}"
        return f"q, k, v have s={rows} rows here, {shared}; shard them by layout.shard"
    if len(layout.cu_padded) > 2 and q.shape[0] != 1:
        return f"b={q.shape[0]} but packed sequences are one stream; pass b=1"
    return None


def _exchange_problem(exchange: str, groups: CpGroups, layout: TokenLayout, q: Tensor, k: Tensor) -> str | None:
    """Why an exchange does not support the layout or cannot shard the heads, or None."""
    label, heads, kv_heads, heads_size = f"exchange={exchange!r}", q.shape[1], k.shape[1], groups.heads.size()
    if layout.kind == "ragged" and exchange in ("ulysses", "usp"):
        return f"{label} needs the same number of rows on each rank, unlike ragged; use ring or all_gather"
    # The stripes of the ranks in a heads group do not make a stripe of the sequence.
    if exchange == "usp" and layout.kind == "striped":
        return f"{label} cannot join striped rows; use ring, all_gather or ulysses, or another layout"
    if exchange in ("ulysses", "usp") and (heads % heads_size or (kv_heads % heads_size and heads_size % kv_heads)):
        rule = "needs h % n == 0, and hk % n == 0 or n % hk == 0"
        return f"{label} cannot shard h={heads}, hk={kv_heads} over {heads_size} ranks ({rule}); use ring or all_gather"
    return None


def _layout_of_name(
    order: str, cu_seqlens: Tensor | Sequence[int] | None, groups: CpGroups, total: int, device: torch.device
) -> TokenLayout:
    """The layout with this name. Dense layouts are cached by shape, so that all layers share one block schedule."""
    if cu_seqlens is not None:
        offsets_of("cu_seqlens", cu_seqlens)
        kind = "packed" if order == "dual_chunk_swap" else order
        return TokenLayout.packed(cu_seqlens, cp_size=groups.size, cp_rank=groups.rank, kind=kind, total=total)
    if order not in ORDERS:
        packed = "; pass cu_seqlens" if order == "packed" else ""
        raise Rejected(f"layout={order!r} is not one of {', '.join(ORDERS)}, or a TokenLayout{packed}")
    return dense_layout(order, total, groups.size, groups.rank, device)


def _on_device(layout: TokenLayout, device: torch.device) -> TokenLayout:
    """The layout on another device, copied once and cached for all layers."""
    return layout.cached(("on", device), lambda: layout.on(device))


def _check_same_offsets(layout: TokenLayout, cu_seqlens: Tensor | Sequence[int] | None) -> None:
    if cu_seqlens is None or cu_seqlens is layout.cu_padded:
        return
    # Compare offsets in another tensor by value, on the host.
    offsets = host_offsets(without_fill(offsets_of("cu_seqlens", cu_seqlens)), "cu_seqlens", Rejected)
    if not torch.equal(offsets, layout.cu_padded.cpu().long()):
        raise Rejected("cu_seqlens differ from the layout's; pass one of them")
