"""Attention over a sequence that is cut over cp, in any order of its tokens.

Rank r holds the queries, keys and values of the positions that the layout gives it, and gets their outputs. How the
ranks let each other see their keys is the exchange: `ring`, `all_gather`, `ulysses` or `usp`.

What attention checks before it sends anything: groups, shapes, the layout, and whether the exchange can cut them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives.arguments import checked_group
from torch_impl.context_parallel.block_schedule import pairs_of
from torch_impl.context_parallel.blockwise_attention import exchanged_attention
from torch_impl.context_parallel.key_exchange import Gathered, Ring
from torch_impl.context_parallel.ulysses import head_parallel_attention
from torch_impl.layouts.divisibility import host_offsets, offsets_of, stripped
from torch_impl.layouts.token_layout import TokenLayout, dense_layout

FUNCTION = "context_parallel.context_parallel_attention"


# V -> V
def context_parallel_attention(
    q: Float[Tensor, "b h s p"],
    k: Float[Tensor, "b hk s p"],
    v: Float[Tensor, "b hk s p"],
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: TokenLayout | str,
    causal: bool = True,
    exchange: str = "ring",
    cu_seqlens: Int[Tensor, " offsets"] | Sequence[int] | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h s p"]:
    """Attention of this rank's queries to all keys of their sequences.

        q "b h s/cp:LAYOUT p", k, v "b hk s/cp:LAYOUT p"   ->   "b h s/cp:LAYOUT p"      with tp: h/tp, hk/tp

    out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j];   query head i uses KV head i * hk // h

    Query i sees key j if both are real tokens of one sequence and j is not behind i (causal) nor `window` or more away,
    in positions inside the sequence. Padding gives 0 and gets gradient 0. `scale` is p ** -0.5 if not
    said, else positive and finite, since of others the operations make NaN where keys are hidden.

    `layout` is a TokenLayout, or contiguous, dual_chunk_swap or striped; `cu_seqlens` are the padded offsets of
    packed sequences in the whole stream, for a batch of one, where the layout does not carry them; dual_chunk_swap then
    is inside each sequence. Give `group`, or `mesh`: of one dim; of two for usp, ring first and heads within, so
    that cp rank = ring_rank * a + heads_rank.

    Cost:   with n ranks, forward; backward. Around a ring and into a reduce_scatter gradients of keys travel in float32
            or wider. Through an all_to_all they travel in k's dtype, and those of a head that several ranks have are
            rounded to it before they are added.
        ring        n - 1 shifts of K and V; the same and n - 1 of their gradients. With contiguous rows and a causal
                    window only as many as the window reaches back.
        all_gather  1 all_gather of K and V; the same and 1 reduce_scatter of their gradients.
        ulysses     2 all_to_alls: q, k, v with max(hk, n) KV heads, and out; the same.
        usp         2 all_to_alls over a, and a ring over m = n / a; the same.
    `attention_bytes` gives the bytes. Saves q (a copy, if its last dim has a stride), k, v, the output and one number
    per query and head. Every rank makes the same calls, whatever it holds and whichever of q, k, v needs a gradient:
    gradients of keys are computed and sent even for q alone. Every rank must run its backward.

    Errors: TypeError if group, mesh, causal, window, scale or offsets are of another kind, dtypes differ or are none of
            float16, bfloat16, float32, float64; ValueError for shapes that do not fit, heads that are no multiple, an
            unknown exchange or one that cannot cut these heads or this layout, a window below 1, a scale that is not
            positive and finite, offsets that cut nothing or differ from the layout's, a batch of packed rows, a layout
            of other ranks.
    Source: arXiv 2310.01889 (ring), 2309.14509 (Ulysses), 2405.07719 (usp).
    """
    cp = checked_groups(FUNCTION, mesh, group, exchange)
    check_tensors(FUNCTION, q, k, v)
    check_rules(FUNCTION, causal, window, scale)
    found = checked_layout(FUNCTION, layout, cu_seqlens, cp, q)
    check_exchange(FUNCTION, exchange, cp, found, q.shape[1], k.shape[1])
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if exchange in ("ulysses", "usp"):
        return head_parallel_attention(q, k, v, found, cp.heads, cp.ring, causal, window, factor)
    way = Ring(cp.ring) if exchange == "ring" else Gathered(cp.ring)
    return exchanged_attention(q, k, v, pairs_of(found, causal, window), way, factor)


EXCHANGES = ("ring", "all_gather", "ulysses", "usp")
DENSE = ("contiguous", "dual_chunk_swap", "striped")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Groups:
    """The ranks of cp: `heads` exchange heads, `ring` keys. Only usp has both with more than one rank in common."""

    ring: ProcessGroup
    heads: ProcessGroup
    size: int
    rank: int


def checked_groups(function: str, mesh: DeviceMesh | None, group: ProcessGroup | None, exchange: str) -> Groups:
    """The groups of an exchange, from a group or a mesh."""
    if exchange not in EXCHANGES:
        raise ValueError(f"{function}: exchange={exchange!r} is not known; it is one of {', '.join(EXCHANGES)}")
    if (mesh is None) == (group is None):
        both = "both" if group is not None else "neither"
        raise ValueError(f"{function}: mesh and group are {both} given; pass one of them")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{function}: mesh is a {type(mesh).__name__}; pass a DeviceMesh")
    dims = 2 if exchange == "usp" else 1
    if mesh is None and dims == 2:
        raise ValueError(f"{function}: exchange='usp' needs a mesh of 2 dims, ring and heads; pass mesh")
    if mesh is None:
        group = checked_group(function, "group", group)
        return Groups(group, group, group.size(), group.rank())
    if mesh.ndim != dims:
        raise ValueError(
            f"{function}: mesh has {mesh.ndim} dims, exchange={exchange!r} needs {dims}; pass a mesh of that many"
        )
    ring, heads = mesh.get_group(0), mesh.get_group(dims - 1)
    if dims == 1:
        return Groups(ring, heads, ring.size(), ring.rank())
    return Groups(ring, heads, ring.size() * heads.size(), ring.rank() * heads.size() + heads.rank())


def check_tensors(function: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes and dtypes that fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name} is a {type(x).__name__}; pass a Tensor")
    shapes = f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ValueError(f"{function}: {shapes}; each is [b, h, s, p]")
    if k.shape != v.shape or any(q.shape[dim] != k.shape[dim] for dim in (0, 2, 3)):
        raise ValueError(f"{function}: {shapes}; they differ in heads only, and k and v not at all")
    if not q.shape[3]:
        raise ValueError(f"{function}: {shapes}; p must be at least 1")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{function}: h={heads} query heads cannot share hk={kv_heads} KV heads (needs a multiple)")
    if q.dtype not in DTYPES or not (q.dtype == k.dtype == v.dtype):
        given = [x.dtype for x in (q, k, v)]
        dtypes, known = (", ".join(str(x).removeprefix("torch.") for x in found) for found in (given, DTYPES))
        raise TypeError(f"{function}: q, k, v are {dtypes}; pass one dtype of {known}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"{function}: q, k, v are on {q.device}, {k.device}, {v.device}; pass one device")


def check_rules(function: str, causal: bool, window: int | None, scale: float | None = None) -> None:
    """What a query sees, and how much of it."""
    if not isinstance(causal, bool):
        raise TypeError(f"{function}: causal is a {type(causal).__name__}; pass True or False")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise TypeError(f"{function}: window is a {type(window).__name__}; pass an int, or None to see all")
    if window is not None and window < 1:
        raise ValueError(f"{function}: window={window} must be at least 1, the query itself; None sees all")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real)):
        raise TypeError(f"{function}: scale is a {type(scale).__name__}; pass a float, or None for p ** -0.5")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"{function}: scale={scale} must be positive and finite; scale q to turn signs round")


def checked_layout(
    function: str, layout: TokenLayout | str, cu_seqlens: Tensor | Sequence[int] | None, cp: Groups, q: Tensor
) -> TokenLayout:
    """The layout, made from its name if need be, known to be that of these ranks and rows."""
    local = q.shape[2]
    if isinstance(layout, str):
        found = _named(function, layout, cu_seqlens, cp, local * cp.size, q.device)
    elif isinstance(layout, TokenLayout):
        found = layout
        _check_same_offsets(function, layout, cu_seqlens)
    else:
        known = ", ".join(DENSE)
        raise TypeError(f"{function}: layout is a {type(layout).__name__}; pass a TokenLayout, or one of {known}")
    if (found.cp_size, found.cp_rank) != (cp.size, cp.rank):
        raise ValueError(
            f"{function}: the layout is for rank {found.cp_rank} of cp={found.cp_size}, this is rank {cp.rank} of "
            f"cp={cp.size}; rebind it"
        )
    if local != found.counts[cp.rank]:
        raise ValueError(
            f"{function}: q, k, v have s={local} rows here, the layout gives this rank {found.counts[cp.rank]} of "
            f"{found.total}; cut them by layout.shard"
        )
    if len(found.cu_padded) > 2 and q.shape[0] != 1:
        raise ValueError(f"{function}: b={q.shape[0]} but packed sequences are one stream; pass b=1")
    return found if found.index.device == q.device else _on(found, q.device)


def check_exchange(function: str, exchange: str, cp: Groups, layout: TokenLayout, heads: int, kv_heads: int) -> None:
    """Whether the exchange can cut these heads, and rows in this order."""
    if layout.kind == "ragged" and exchange != "all_gather":
        raise ValueError(
            f"{function}: exchange={exchange!r} needs as many rows on each rank, which ragged has not; use all_gather"
        )
    if exchange == "usp" and layout.kind == "striped":
        raise ValueError(
            f"{function}: exchange='usp' cannot join striped rows; use ring, all_gather or ulysses, or another layout"
        )
    a = cp.heads.size()
    if exchange in ("ulysses", "usp") and (heads % a or (kv_heads % a and a % kv_heads)):
        raise ValueError(
            f"{function}: exchange={exchange!r} cannot cut h={heads}, hk={kv_heads} over {a} ranks "
            "(needs h % n == 0, and hk % n == 0 or n % hk == 0); use ring or all_gather"
        )


def _named(
    function: str, kind: str, cu_seqlens: Tensor | Sequence[int] | None, cp: Groups, total: int, device: torch.device
) -> TokenLayout:
    if cu_seqlens is not None:
        offsets_of(f"{function}: cu_seqlens", cu_seqlens)
        kind = "packed" if kind == "dual_chunk_swap" else kind
        return TokenLayout.packed(cu_seqlens, cp_size=cp.size, cp_rank=cp.rank, kind=kind, total=total)
    if kind not in DENSE:
        packed = "; pass cu_seqlens" if kind == "packed" else ""
        raise ValueError(f"{function}: layout={kind!r} is not one of {', '.join(DENSE)}, or a TokenLayout{packed}")
    return dense_layout(kind, total, cp.size, cp.rank, device)


def _on(layout: TokenLayout, device: torch.device) -> TokenLayout:
    """One copy for all layers of a batch whose layout was made elsewhere: a memo, for as long as the layout lives."""
    return layout.derived(("on", device), lambda: layout.on(device))


def _check_same_offsets(function: str, layout: TokenLayout, cu_seqlens: Tensor | Sequence[int] | None) -> None:
    if cu_seqlens is None or cu_seqlens is layout.cu_padded:
        return
    name = f"{function}: cu_seqlens"
    given = host_offsets(stripped(offsets_of(name, cu_seqlens)), name)
    if not torch.equal(given, layout.cu_padded.cpu().long()):
        raise ValueError(f"{function}: cu_seqlens differ from the layout's; pass one of them")
