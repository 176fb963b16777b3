"""Chunks of each sequence put in another order, and ranks put against sequences, by slicing."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from jax_ref.layouts.dual_chunk_swap import dual_chunk_swap

Offsets = Sequence[int] | np.ndarray


def reorder_chunks(x: np.ndarray, order: Sequence[int], cu_seqlens: Offsets | None = None) -> np.ndarray:
    """Chunk `order[j]` in place j, of dim 1 or of each sequence of dim 0.

    >>> reorder_chunks(np.arange(6), [1, 0], [0, 2, 6])
    array([1, 0, 4, 5, 2, 3])
    """
    if cu_seqlens is None:
        chunks = np.split(x, len(order), axis=1)
        return np.concatenate([chunks[source] for source in order], axis=1)
    rows = [x[:0]]
    for start, stop in pairwise(cu_seqlens):
        chunks = np.split(x[start:stop], len(order))
        rows += [chunks[source] for source in order]
    return np.concatenate(rows)


def undo_attention_load_balancing(x: np.ndarray, cp_size: int, cu_seqlens: Offsets) -> np.ndarray:
    """Each sequence's rows put where DualChunkSwap took them from."""
    out = np.empty_like(x)
    for start, stop in pairwise(cu_seqlens):
        out[start:stop][np.concatenate(dual_chunk_swap(stop - start, cp_size))] = x[start:stop]
    return out


def redo_attention_load_balancing(x: np.ndarray, cp_size: int, cu_seqlens: Offsets) -> np.ndarray:
    """Each sequence's rows in the order of its DualChunkSwap shares."""
    pieces = [x[:0]]
    for start, stop in pairwise(cu_seqlens):
        pieces += [x[start:stop][share] for share in dual_chunk_swap(stop - start, cp_size)]
    return np.concatenate(pieces)


def deinterleave_packed_seqs(x: np.ndarray, cu_seqlens: Offsets, cp_size: int) -> np.ndarray:
    """For each sequence, the share of rank 0, of rank 1, ...; offsets are those of one rank's stream."""
    ranks = np.split(x, cp_size)
    return np.concatenate([x[:0], *(rank[start:stop] for start, stop in pairwise(cu_seqlens) for rank in ranks)])


def reinterleave_packed_seqs(x: np.ndarray, cu_seqlens: Offsets, cp_size: int) -> np.ndarray:
    """For each rank, its share of sequence 0, of sequence 1, ..."""
    ranks = [[x[:0]] for _ in range(cp_size)]
    for start, stop in pairwise(cu_seqlens):
        for held, share in zip(ranks, np.split(x[cp_size * start : cp_size * stop], cp_size), strict=True):
            held.append(share)
    return np.concatenate([share for held in ranks for share in held])
