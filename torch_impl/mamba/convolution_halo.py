"""The halo of a short causal convolution: the rows before each segment of a shard, from whichever rank has them.

A segment is a run of tokens of one sequence. Shards may be shorter than the convolution: then the rows come from
several ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_gather, large_tensors
from torch_impl.contract import Group, PositiveInt, Rejected, Sharded, contract
from torch_impl.mamba.mix import convolution
from torch_impl.mamba.segments import IN_ORDER, Halo, halo_of, with_zeros
from torch_impl.mamba.token_layouts import Order, shard_layout


# Gradient types: V -> V.
@contract
def convolution_halo(
    x: Sharded[Tensor, "b s/cp:LAYOUT c"],
    d_conv: PositiveInt,
    cp_group: Group[ProcessGroup, "cp"],
    *,
    layout: Order = "dual_chunk_swap",
    cu_seqlens: Int[Tensor, " offsets"] | None = None,
) -> Sharded[Tensor, "b m/cp:LAYOUT w c"]:
    """The w = d_conv - 1 rows before each of this rank's m segments, which a causal convolution reads too.

    Under contiguous only the rank's first segment counts, which ends where the sequence of the rank's first token ends.
    Under dual_chunk_swap a rank has two segments per sequence, its chunk of the first half and its chunk of the second.
    Rows are in the order of the sequence. A row before the start of the sequence is 0. If another rank reads a row, the
    row's gradient is sent back to the rank that has the row, and added there.

    `layout` is contiguous, dual_chunk_swap (inside each sequence of a packed stream), or a TokenLayout in one of these
    orders or ragged; ranks may hold fewer than w tokens, or none. `cu_seqlens` are the padded offsets of the full
    stream, for a batch of one.

    Cost:   1 all_gather forward, 1 reduce_scatter backward. Bytes of their inputs: b * m * w * c * itemsize; backward
            n times as many elements, in float32 or wider. None if no rank has a token. Saves indices only.
    Errors: TypeError for a cp_group that is no ProcessGroup, or an unsupported dtype; ValueError for d_conv below 1,
            offsets that do not end at n * s or with several rows, or another layout.
    """
    tokens = shard_layout(layout, "x", x, cu_seqlens, cp_group)
    width, sequences = d_conv - 1, len(tokens.cu_padded) - 1
    segments = 1 if tokens.kind in IN_ORDER else 2 * sequences
    if not tokens.total:
        return F.pad(x, (0, 0, 0, segments * width)).unflatten(1, (segments, width))
    rows = rows_before(x, halo_of(tokens, d_conv, x.device), cp_group)
    return rows.unflatten(1, (segments, width))


# Gradient types: V -> V, of the parameters R.
@contract
def causal_conv_over_cp(
    x: Sharded[Tensor, "b s/cp:LAYOUT c"],
    weight: Sharded[Tensor, "c k cp=R"],
    cp_group: Group[ProcessGroup, "cp"],
    *,
    bias: Sharded[Tensor, "c cp=R"] | None = None,
    layout: Order = "dual_chunk_swap",
    cu_seqlens: Int[Tensor, " offsets"] | None = None,
) -> Sharded[Tensor, "b s/cp:LAYOUT c"]:
    """Causal depthwise convolution and silu of this rank's rows, along each sequence on whichever ranks it lies.

        silu(bias + sum over j < k of weight[:, k - 1 - j] * x[t - j])

    Positions t - j before the start of t's sequence read zero. `layout` and `cu_seqlens` are as in `convolution_halo`.
    Sums over taps are in float32 or wider. If two segments read a row, each rounds its gradient of that row to x's
    dtype before the two are added. Under tensor parallelism c is the rank's own channels, c/tp. The gradients of weight
    and bias are this rank's terms, from its rows: the full ones are the SUM over cp.

    Cost:   `convolution_halo` with d_conv = k, and one copy of x with the halo in front of each segment; the
            convolution copies x for each of the k taps, unless causal-conv1d's kernel runs.
    Errors: as `convolution_halo`; ValueError if weight or bias does not fit x.
    """
    if not weight.shape[1]:
        raise Rejected(f"weight is {list(weight.shape)}; a convolution has at least one tap, [c, k]")
    tokens = shard_layout(layout, "x", x, cu_seqlens, cp_group)
    if not tokens.total:
        return x
    return convolution_with_halo(x, weight, bias, halo_of(tokens, weight.shape[1], x.device), cp_group)


def convolution_with_halo(
    x: Float[Tensor, "b t c"],
    weight: Float[Tensor, "c k"],
    bias: Float[Tensor, " c"] | None,
    halo: Halo,
    group: ProcessGroup,
) -> Float[Tensor, "b t c"]:
    """The convolution of the local rows, with the k - 1 rows before each segment."""
    # 1. Put the rows before each local segment in front of it.
    extended = large_tensors.index_select(torch.cat([x, rows_before(x, halo, group)], 1), halo.extended, 1)
    # 2. Convolve, and drop the outputs at the inserted rows.
    y = convolution(extended, weight, bias, halo.ids.expand(len(x), -1))
    return large_tensors.index_select(y, halo.local, 1)


def rows_before(x: Float[Tensor, "b t c"], halo: Halo, group: ProcessGroup) -> Float[Tensor, "b m c"]:
    """The rows before each local segment, one segment after another."""
    # 1. Gather the last rows of every rank's segments. "R": the ranks read different rows, so cotangents add up.
    sent = large_tensors.index_select(x, halo.sent, 1) if x.shape[1] else F.pad(x, (0, 0, 0, len(halo.sent)))
    gathered = all_gather(sent[None], group, out="R")  # b k c -> n b k c
    # 2. Select the rows before each local segment.
    return large_tensors.index_select(with_zeros(gathered.transpose(0, 1).flatten(1, 2)), halo.before, 1)
