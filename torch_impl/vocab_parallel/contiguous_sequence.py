"""Reorder a sequence from DualChunkSwap to contiguous blocks, and shift it by one position across ranks.

Over cp ranks a sequence has 2 cp chunks. In DualChunkSwap order rank r has chunks r and 2 cp - 1 - r; in contiguous
order it has chunks 2 r and 2 r + 1. Each rank sends its two chunks to their new ranks; no rank ever holds the full
sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_to_all, ring_shift
from torch_impl.contract import Group, Rejected, ShardedAny, contract
from torch_impl.layouts.fill import fill_of
from torch_impl.vocab_parallel.sequence_gather import why_not_a_dim, why_not_gathered


@contract
def cp_load_balanced_to_contiguous(
    tensor: ShardedAny[Tensor, "... s/cp:dual_chunk_swap ..."], cp_group: Group[ProcessGroup, "cp"], seq_dim: int = 1
) -> ShardedAny[Tensor, "... s/cp ..."]:
    """This rank's contiguous block of the sequence, from shards in DualChunkSwap order along `seq_dim`.

        A0 A3                [A0, A1]
               A1 A2    =>             [A2, A3]

    The dtype may be any that the group's backend sends (gloo sends all but float8, int16 and unsigned dtypes wider than
    uint8), and the result keeps it. Any strides. Backward: the reverse exchange.

    Cost:   1 all_to_all of the shard forward, 1 backward. Saves nothing.
    Errors: TypeError if cp_group is not a ProcessGroup; ValueError if the tensor has no such dim, or for an odd number
            of positions per rank over two ranks or more.
    """
    cp, rank = cp_group.size(), cp_group.rank()
    reason = why_not_gathered(tensor, seq_dim, cp)
    if reason:
        raise Rejected(reason)
    if cp == 1:  # the identity, but the result must not alias the argument
        return tensor.clone(memory_format=torch.contiguous_format)
    # 1. Send two chunks, chunk c to rank c // 2, and receive two. Chunks ascend, and so do their destination ranks.
    chunk = tensor.shape[seq_dim] // 2
    sent, received = [0] * cp, [0] * cp
    for c in (rank, 2 * cp - 1 - rank):
        sent[c // 2] += chunk
    for c in (2 * rank, 2 * rank + 1):
        received[_rank_of(c, cp)] += chunk
    blocks = all_to_all(
        tensor, cp_group, split_dim=seq_dim, concat_dim=seq_dim, split_lengths=sent, concat_lengths=received
    )
    # 2. Chunks arrive in the order of the sending ranks, and from chunk cp on, later chunks come from earlier ranks.
    if _rank_of(2 * rank + 1, cp) >= _rank_of(2 * rank, cp):
        return blocks
    first, second = blocks.chunk(2, dim=seq_dim)  # two chunks even for 0 positions
    return torch.cat([second, first], dim=seq_dim)


@contract
def cp_shift_next(
    tensor: ShardedAny[Tensor, "... s/cp ..."],
    cp_group: Group[ProcessGroup, "cp"],
    seq_dim: int = 1,
    fill_value: float | int = 0,
) -> ShardedAny[Tensor, "... s/cp ..."]:
    """Shift `tensor` one position towards the front, across ranks; the last position of the sequence gets `fill_value`.

        [A0, A1]                [A1, A2]
                  [A2, A3]  =>            [A3, fill]

    The sequence is in contiguous blocks along `seq_dim`, equally long on all ranks; for token ids the usual fill is
    -100. The dtype may be any that torch fills (all but float8 and unsigned dtypes wider than uint8), and the result
    keeps it. Any strides. Call `cp_load_balanced_to_contiguous` first for shards in DualChunkSwap order.

    Cost:   1 send and 1 recv of one position forward, the same backward. Saves nothing.
    Errors: TypeError if cp_group is not a ProcessGroup or fill_value is not a real number; ValueError if the tensor
            has no such dim, or its dtype cannot represent fill_value, such as -100 in uint8 or 1.5 in int64.
    """
    fill = fill_of(tensor, fill_value)
    reason = why_not_a_dim(tensor, seq_dim)
    if reason:
        raise Rejected(reason)
    local = tensor.shape[seq_dim]
    if local == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    arriving = ring_shift(tensor.narrow(seq_dim, 0, 1), cp_group, -1)
    # Masked, not replaced: every rank's message stays in the graph, so no rank waits for a missing one in backward.
    is_last = torch.tensor(cp_group.rank() == cp_group.size() - 1, device=tensor.device)
    arriving = arriving.masked_fill(is_last, fill)
    return torch.cat([tensor.narrow(seq_dim, 1, local - 1), arriving], dim=seq_dim)


def _rank_of(chunk: int, cp: int) -> int:
    """The rank that has a chunk in DualChunkSwap order."""
    return min(chunk, 2 * cp - 1 - chunk)
