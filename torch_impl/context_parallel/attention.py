"""Attention over a sequence that is cut over cp, in any order of its tokens.

Rank r holds the queries, keys and values of the positions that the layout gives it, and gets their outputs. How the
ranks let each other see their keys is the exchange: `ring`, `all_gather`, `ulysses` or `usp`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.context_parallel import attention_arguments as arguments
from torch_impl.context_parallel.exchanged import exchanged_attention
from torch_impl.context_parallel.gathered import Gathered
from torch_impl.context_parallel.pairs import pairs_of
from torch_impl.context_parallel.ring import Ring
from torch_impl.context_parallel.ulysses import head_parallel_attention
from torch_impl.layouts.token_layout import TokenLayout

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
    cp = arguments.checked_groups(FUNCTION, mesh, group, exchange)
    arguments.check_tensors(FUNCTION, q, k, v)
    arguments.check_rules(FUNCTION, causal, window, scale)
    found = arguments.checked_layout(FUNCTION, layout, cu_seqlens, cp, q)
    arguments.check_exchange(FUNCTION, exchange, cp, found, q.shape[1], k.shape[1])
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if exchange in ("ulysses", "usp"):
        return head_parallel_attention(q, k, v, found, cp.heads, cp.ring, causal, window, factor)
    way = Ring(cp.ring) if exchange == "ring" else Gathered(cp.ring)
    return exchanged_attention(q, k, v, pairs_of(found, causal, window), way, factor)
