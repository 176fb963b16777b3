"""From the DualChunkSwap order of a sequence to contiguous blocks, and one position on over the ranks' borders.

Over cp ranks a sequence is 2 cp chunks. By DualChunkSwap rank r has chunks r and 2 cp - 1 - r; contiguously it has
chunks 2 r and 2 r + 1. Each rank sends its two chunks where they belong, so that no rank ever holds the full sequence.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_to_all, ring_shift
from torch_impl.contract import Group, Rejected, ShardedAny, contract, dtype_name, type_name
from torch_impl.vocab_parallel.sequence_gather import why_not_a_dim, why_not_gathered


@contract
def cp_load_balanced_to_contiguous(
    tensor: ShardedAny[Tensor, "... s/cp:dual_chunk_swap ..."], cp_group: Group[ProcessGroup, "cp"], seq_dim: int = 1
) -> ShardedAny[Tensor, "... s/cp ..."]:
    """This rank's contiguous block of the sequence, from shards in DualChunkSwap order.

        tensor  "b s/cp:dual_chunk_swap d"   ->   "b s/cp d"

        A0 A3                [A0, A1]
               A1 A2    =>             [A2, A3]

    Any dtype that the group's backend sends, which stays (of gloo all but float8, int16 and unsigned ones wider than
    uint8), and any strides. Backward: the same exchange with its two sides swapped.

    Cost:   1 all_to_all of the shard forward, 1 backward. Saves nothing.
    Errors: TypeError if cp_group is None or no ProcessGroup; ValueError for a dim that the tensor lacks, or an
            odd number of positions per rank over two ranks or more.
    """
    cp, rank = cp_group.size(), cp_group.rank()
    reason = why_not_gathered(tensor, seq_dim, cp)
    if reason:
        raise Rejected(reason)
    if cp == 1:  # the identity, but no alias of the argument
        return tensor.clone(memory_format=torch.contiguous_format)
    # 1. Two chunks go out, chunk c to rank c // 2, and two come in. They ascend, and so do the ranks they go to.
    chunk = tensor.shape[seq_dim] // 2
    sent, received = [0] * cp, [0] * cp
    for c in (rank, 2 * cp - 1 - rank):
        sent[c // 2] += chunk
    for c in (2 * rank, 2 * rank + 1):
        received[_rank_of(c, cp)] += chunk
    blocks = all_to_all(
        tensor, cp_group, split_dim=seq_dim, concat_dim=seq_dim, split_lengths=sent, concat_lengths=received
    )
    # 2. What arrived is in the order of the sending ranks, and from chunk cp on later chunks are on earlier ranks.
    if _rank_of(2 * rank + 1, cp) >= _rank_of(2 * rank, cp):
        return blocks
    first, second = blocks.chunk(2, dim=seq_dim)  # also of no positions
    return torch.cat([second, first], dim=seq_dim)


@contract
def cp_shift_next(
    tensor: ShardedAny[Tensor, "... s/cp ..."],
    cp_group: Group[ProcessGroup, "cp"],
    seq_dim: int = 1,
    fill_value: float | int = 0,
) -> ShardedAny[Tensor, "... s/cp ..."]:
    """At each position what the next one has, over the ranks' borders; the last of the sequence has `fill_value`.

        tensor  "b s/cp d"   ->   "b s/cp d"

        [A0, A1]                [A1, A2]
                  [A2, A3]  =>            [A3, fill]

    The sequence is in contiguous blocks, every rank has as many positions, and of ids the natural fill is -100. Any
    dtype that torch fills, which stays (all but float8 and unsigned ones wider than uint8), and any strides. Shards in
    DualChunkSwap order come through `cp_load_balanced_to_contiguous` first.

    Cost:   1 send and 1 recv of one position forward, the same backward. Saves nothing.
    Errors: TypeError if cp_group is None or no ProcessGroup, or fill_value is no real number; ValueError for a dim that
            the tensor lacks, or a fill_value that its dtype does not have, as -100 of uint8 or 1.5 of int64.
    """
    fill = _fill_of(tensor, fill_value)
    reason = why_not_a_dim(tensor, seq_dim)
    if reason:
        raise Rejected(reason)
    local = tensor.shape[seq_dim]
    if local == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    arriving = ring_shift(tensor.narrow(seq_dim, 0, 1), cp_group, -1)
    # Masked, not replaced: every rank's message stays in the graph, so that in backward none waits for one in vain.
    is_last = torch.tensor(cp_group.rank() == cp_group.size() - 1, device=tensor.device)
    arriving = arriving.masked_fill(is_last, fill)
    return torch.cat([tensor.narrow(seq_dim, 1, local - 1), arriving], dim=seq_dim)


def _fill_of(tensor: Tensor, fill_value: float | int) -> float | int:
    """The fill as a number of the tensor's dtype, which torch would wrap or truncate it to.

    Errors: TypeError for what is no real number, ValueError for one that the dtype does not have.
    """
    dtype = tensor.dtype
    if not isinstance(fill_value, numbers.Real) or (isinstance(fill_value, bool) and dtype != torch.bool):
        raise Rejected(f"fill_value={fill_value!r} is {type_name(fill_value)}; pass a number", TypeError)
    if dtype.is_floating_point or dtype.is_complex:
        fits = not torch.finfo(dtype).max < abs(fill_value) < math.inf  # infinities and NaN fit
    else:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        fits = low <= fill_value <= high and fill_value == int(fill_value)
    if not fits:
        raise Rejected(f"fill_value={fill_value} is no value of {dtype_name(tensor)}")
    return float(fill_value) if dtype.is_floating_point or dtype.is_complex else int(fill_value)


def _rank_of(chunk: int, cp: int) -> int:
    """The rank that has a chunk by DualChunkSwap."""
    return min(chunk, 2 * cp - 1 - chunk)
