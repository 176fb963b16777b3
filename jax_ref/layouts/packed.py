"""Packed: many sequences in one stream, each cut by DualChunkSwap, kept in order."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from jax_ref.layouts.dual_chunk_swap import dual_chunk_swap
from jax_ref.layouts.needs import check_cuttable, needs


def packed(size: int, world: int, cu_seqlens: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Rank r holds its DualChunkSwap share of sequence 0, then of sequence 1, ...

    `cu_seqlens` are the padded offsets, from 0 to `size`; sequence j is `cu_seqlens[j]:cu_seqlens[j + 1]`.

    >>> packed(12, 2, [0, 4, 12])
    [array([ 0,  3,  4,  5, 10, 11]), array([1, 2, 6, 7, 8, 9])]

    Errors: ValueError if the offsets do not run from 0 up to size, or a padded length cannot be cut.
    """
    check_cuttable(size, world, "packed")
    offsets = checked_offsets(cu_seqlens, size)
    shares: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(world)]
    multiple = needs("dual_chunk_swap", world)
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        length = stop - start
        if length % multiple:
            padded = length + multiple - length % multiple
            raise ValueError(
                f"cu_seqlens: sequence {sequence} has padded length {length}, "
                f"dual_chunk_swap over world={world} needs a multiple of {multiple}; pad it to {padded}"
            )
        for share, positions in zip(shares, dual_chunk_swap(length, world), strict=True):
            share.append(start + positions)
    return [np.concatenate(share) for share in shares]


def checked_offsets(cu_seqlens: Sequence[int] | np.ndarray, size: int) -> list[int]:
    """The offsets as integers, known to run from 0 up to `size` without a step back."""
    offsets = np.asarray(cu_seqlens)
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"cu_seqlens: shape is {offsets.shape}; offsets are one row of at least [0]")
    if offsets.dtype.kind not in "iu":
        raise TypeError(f"cu_seqlens: dtype is {offsets.dtype}; offsets are integers")
    if offsets[0]:
        raise ValueError(f"cu_seqlens: starts at {offsets[0]}; offsets start at 0")
    steps = np.diff(offsets.astype(np.int64))
    if (steps < 0).any():
        sequence = int(np.argmax(steps < 0))
        raise ValueError(
            f"cu_seqlens: sequence {sequence} runs from {offsets[sequence]} back to {offsets[sequence + 1]}; "
            "offsets never decrease"
        )
    if offsets[-1] != size:
        raise ValueError(
            f"cu_seqlens ends at {offsets[-1]} but the stream holds {size} tokens; pass the padded offsets"
        )
    return offsets.tolist()
