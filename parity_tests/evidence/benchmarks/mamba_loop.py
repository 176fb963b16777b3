"""The exchanges of a hidden-parallel mixer, sequence by sequence: the arm that the benchmark compares with.

z, x, B, C and dt are exchanged one by one. Each sequence is sliced out of every rank's received rows, then split into
chunks; all slices are joined. Offsets are read one number at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_impl.mamba import MambaContextParallel
from torch_impl.mamba.all_to_all import _all_to_all_cp2hp, _all_to_all_hp2cp


def loop_pre(x: Tensor, cu: Tensor, strategy: MambaContextParallel) -> Tensor:
    """As `pre_conv_ssm`."""
    z, inner, B, C, dt = x.split(list(strategy.sizes.blocks), -1)
    parts = z, inner, strategy._repeat_group_state(B), strategy._repeat_group_state(C), dt
    in_columns = []
    for part in parts:
        arrived = _all_to_all_cp2hp(part, strategy.cp_group, 1)
        in_columns.append(sequential(sequence_major(arrived, cu, strategy.cp_size), cu, strategy.cp_size))
    return torch.cat(in_columns, -1)


def loop_post(output: Tensor, cu: Tensor, strategy: MambaContextParallel) -> Tensor:
    """As `post_conv_ssm`."""
    swapped = balanced(output, cu, strategy.cp_size)
    return _all_to_all_hp2cp(rank_major(swapped, cu, strategy.cp_size), strategy.cp_group, 1)


def sequence_major(x: Tensor, cu: Tensor, cp: int) -> Tensor:
    """Reorder rows from rank by rank to sequence by sequence."""
    local, pieces = len(x) // cp, []
    for j in range(len(cu) - 1):
        start, stop = cu[j].item() // cp, cu[j + 1].item() // cp
        pieces += [x[rank * local + start : rank * local + stop] for rank in range(cp)]
    return torch.cat(pieces)


def rank_major(x: Tensor, cu: Tensor, cp: int) -> Tensor:
    pieces: list[list[Tensor]] = [[] for _ in range(cp)]
    for j in range(len(cu) - 1):
        start, share = cu[j].item(), (cu[j + 1].item() - cu[j].item()) // cp
        for rank in range(cp):
            pieces[rank].append(x[start + rank * share : start + (rank + 1) * share])
    return torch.cat([piece for of_rank in pieces for piece in of_rank])


def sequential(x: Tensor, cu: Tensor, cp: int) -> Tensor:
    """Chunks r and 2 cp - 1 - r of each rank r in turn -> chunks in their order."""
    return in_chunks(x, cu, [*range(0, 2 * cp, 2), *range(2 * cp - 1, 0, -2)])


def balanced(x: Tensor, cu: Tensor, cp: int) -> Tensor:
    return in_chunks(x, cu, [chunk for rank in range(cp) for chunk in (rank, 2 * cp - 1 - rank)])


def in_chunks(x: Tensor, cu: Tensor, order: list[int]) -> Tensor:
    """Equal chunks of each sequence in another order."""
    pieces = []
    for j in range(len(cu) - 1):
        chunks = x[cu[j].item() : cu[j + 1].item()].chunk(len(order))
        pieces += [chunks[i] for i in order]
    return torch.cat(pieces)
