"""DualChunkSwap: each rank holds one chunk from the front and its mirror image from the back.

Under a causal mask late tokens cost more than early ones; the pairing gives every rank the same work.
"""

import numpy as np

from jax_ref.layouts.needs import check_cuttable


def dual_chunk_swap(size: int, world: int) -> list[np.ndarray]:
    """Of 2 * world equal chunks, rank r holds chunk r, then chunk 2 * world - 1 - r.

    >>> dual_chunk_swap(8, 2)
    [array([0, 1, 6, 7]), array([2, 3, 4, 5])]

    Source: arXiv 2310.03294 (balanced causal work); the chunk order is Megatron-LM's.
    """
    check_cuttable(size, world, "dual_chunk_swap")
    chunks = np.arange(size, dtype=np.int64).reshape(2 * world, size // (2 * world))
    front, back = chunks[:world], np.flip(chunks[world:], axis=0)
    return [np.concatenate(pair) for pair in zip(front, back, strict=True)]
