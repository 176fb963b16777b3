"""The positions of each rank under a layout, by its definition, in NumPy. The harness shards and restores with them.

A layout is a function of a size and a number of ranks that returns the positions of each rank. Production code uses
index arithmetic; this module reshapes, flips and slices arrays, so that both are unlikely to share a mistake.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

Offsets = Sequence[int] | np.ndarray
SHOWN = 8  # positions listed in a message before it says how many more there are
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

MULTIPLES = {
    "contiguous": lambda world: world,
    "ragged": lambda world: 1,
    "dual_chunk_swap": lambda world: 2 * world,
    "striped": lambda world: world,
    "packed": lambda world: 1,  # for the total; each sequence must be a multiple for dual_chunk_swap
}


def needs(layout: str, world: int) -> int:
    """The multiple that a layout requires of a size; 1 if any size will do, as for custom layouts."""
    return MULTIPLES[layout](world) if layout in MULTIPLES else 1


def indivisible(dim: str, size: int, axis: str, world: int, layout: str) -> str | None:
    """Why a layout cannot shard `dim`, or None if it can.

    >>> indivisible("s", 30, "cp", 4, "dual_chunk_swap")
    's=30 cannot be sharded by dual_chunk_swap over cp=4 (needs a multiple of 8); pad to 32'
    >>> indivisible("s", 32, "cp", 4, "dual_chunk_swap")
    """
    if size < 0:
        return f"{dim}={size} is not a size; sizes are 0 or more"
    if world < 1:
        return f"{axis}={world} is not a number of ranks; it is 1 or more"
    multiple = needs(layout, world)
    if size % multiple == 0:
        return None
    padded = size + multiple - size % multiple
    problem = f"{dim}={size} cannot be sharded by {layout} over {axis}={world}"
    return f"{problem} (needs a multiple of {multiple}); pad to {padded}"


def check_cuttable(size: int, world: int, layout: str) -> None:
    """ValueError if a layout cannot shard `size` over `world` ranks."""
    sentence = indivisible("size", size, "world", world, layout)
    if sentence:
        raise ValueError(sentence)


# The layouts.


def contiguous(size: int, world: int) -> list[np.ndarray]:
    """Rank r has block r of `world` equal blocks.

    >>> contiguous(6, 3)
    [array([0, 1]), array([2, 3]), array([4, 5])]
    """
    check_cuttable(size, world, "contiguous")
    return list(np.arange(size, dtype=np.int64).reshape(world, size // world))


def striped(size: int, world: int) -> list[np.ndarray]:
    """Rank r has positions r, r + world, r + 2 * world, ...

    >>> striped(6, 3)
    [array([0, 3]), array([1, 4]), array([2, 5])]

    Source: arXiv 2311.09431 (striped attention).
    """
    check_cuttable(size, world, "striped")
    return list(np.ascontiguousarray(np.arange(size, dtype=np.int64).reshape(size // world, world).T))


def dual_chunk_swap(size: int, world: int) -> list[np.ndarray]:
    """Rank r has chunks r and 2 * world - 1 - r of 2 * world equal chunks.

    >>> dual_chunk_swap(8, 2)
    [array([0, 1, 6, 7]), array([2, 3, 4, 5])]

    Source: arXiv 2310.03294 (balanced causal work); the chunk order is Megatron-LM's.
    """
    check_cuttable(size, world, "dual_chunk_swap")
    # Early chunks see few keys and late chunks many: every pair r and 2 * world - 1 - r has the same causal work.
    chunks = np.arange(size, dtype=np.int64).reshape(2 * world, size // (2 * world))
    front, back = chunks[:world], np.flip(chunks[world:], axis=0)
    return [np.concatenate(pair) for pair in zip(front, back, strict=True)]


def ceil_lengths(size: int, world: int) -> list[int]:
    """DTensor's rule: blocks of ceil(size / world) until nothing is left.

    >>> ceil_lengths(4, 3)
    [2, 2, 0]
    """
    block = -(-size // world)
    lengths = []
    for _ in range(world):
        # The rest may be less than a block, or empty: the last ranks are then short or empty.
        lengths.append(min(block, size - sum(lengths)))
    return lengths


def ragged(size: int, world: int, lengths: Sequence[int] | None = None) -> list[np.ndarray]:
    """Rank r has the next `lengths[r]` positions; without lengths, DTensor's ceil rule.

    >>> ragged(7, 3)
    [array([0, 1, 2]), array([3, 4, 5]), array([6])]

    Errors: ValueError unless there is one non-negative length for each rank and they add up to size.
    """
    check_cuttable(size, world, "ragged")
    if lengths is None:
        lengths = ceil_lengths(size, world)
    counts = tuple(int(length) for length in lengths)
    if len(counts) != world:
        raise ValueError(f"ragged: lengths {counts} have {len(counts)} entries, world={world}; give one for each rank")
    if any(length < 0 for length in counts):
        raise ValueError(f"ragged: lengths {counts} have a negative one; lengths are 0 or more")
    if sum(counts) != size:
        raise ValueError(f"ragged: lengths {counts} add up to {sum(counts)}, size={size}; they must be equal")
    blocks, left = [], np.arange(size, dtype=np.int64)
    for length in counts:
        blocks.append(left[:length])
        left = left[length:]
    return blocks


def packed(size: int, world: int, cu_seqlens: Offsets) -> list[np.ndarray]:
    """Rank r has its DualChunkSwap shard of sequence 0, then of sequence 1, ...

    `cu_seqlens` are the padded offsets, from 0 to `size`; sequence j is `cu_seqlens[j]:cu_seqlens[j + 1]`.

    >>> packed(12, 2, [0, 4, 12])
    [array([ 0,  3,  4,  5, 10, 11]), array([1, 2, 6, 7, 8, 9])]

    Errors: ValueError if the offsets do not run from 0 up to size, or a padded length cannot be sharded.
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


def checked_offsets(cu_seqlens: Offsets, size: int) -> list[int]:
    """The offsets as integers; an error unless they run from 0 to `size` and never decrease."""
    offsets = np.asarray(cu_seqlens)
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"cu_seqlens: shape is {offsets.shape}; offsets are one row that starts at 0")
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


# Functions of any layout: its inverse, the check that it is a partition, and a drawing.


def inverse(positions: Sequence[np.ndarray]) -> np.ndarray:
    """`inverse[p]` is the row of position p in the concatenated shards of rank 0, rank 1, ...

    >>> inverse([np.array([0, 3]), np.array([1, 2])])
    array([0, 2, 3, 1])
    """
    return np.argsort(np.concatenate(positions), kind="stable")


def check_partition(name: str, positions: Sequence[np.ndarray], size: int) -> None:
    """ValueError unless `positions`, one array per rank, contain each of `range(size)` once.

    >>> check_partition("mine", [np.array([0, 1, 1, 3]), np.array([4, 5, 6, 7])], 8)
    Traceback (most recent call last):
    ValueError: layout 'mine' is not a partition of 8 positions over 2 ranks: missing [2], repeated [1]
    """
    for rank, row in enumerate(positions):
        array = np.asarray(row)
        if array.ndim != 1:
            raise ValueError(
                f"layout {name!r} gives rank {rank} an array of shape {array.shape}; positions are one row"
            )
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"layout {name!r} gives rank {rank} dtype {array.dtype}; positions are integers")
    # Count every entry: each position must occur once, and no other number may occur.
    everything = np.concatenate([np.zeros(0, np.int64), *(np.asarray(row).astype(np.int64) for row in positions)])
    inside = (everything >= 0) & (everything < size)
    count = np.bincount(everything[inside], minlength=size)
    wrong = {
        "missing": np.flatnonzero(count == 0),
        "repeated": np.flatnonzero(count > 1),
        "outside": np.unique(everything[~inside]),
    }
    problems = ", ".join(f"{what} {_listed(where)}" for what, where in wrong.items() if len(where))
    if problems:
        ranks = f"{len(positions)} rank{'' if len(positions) == 1 else 's'}"
        raise ValueError(f"layout {name!r} is not a partition of {size} positions over {ranks}: {problems}")


def _listed(where: np.ndarray) -> str:
    more = len(where) - SHOWN
    return str(where[:SHOWN].tolist()) + (f" and {more} more" if more > 0 else "")


def draw(layout: Callable[[int, int], Sequence[np.ndarray]], size: int, world: int) -> str:
    """One digit per position: the rank that has it; letters from rank 10 on, `?` from rank 36 on.

    >>> draw(dual_chunk_swap, 16, 4)
    '0011223333221100'
    """
    shards = layout(size, world)
    check_partition(getattr(layout, "__name__", "given"), shards, size)
    owner = {}
    for rank, positions in enumerate(shards):
        for position in positions:
            owner[int(position)] = DIGITS[rank] if rank < len(DIGITS) else "?"
    return "".join(owner[position] for position in range(size))


# Reorder unsharded streams, by slicing.


def reorder_chunks(x: np.ndarray, order: Sequence[int], cu_seqlens: Offsets | None = None) -> np.ndarray:
    """Permute chunks of dim 1, or of each sequence in dim 0: output chunk j is input chunk `order[j]`.

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
    """Each sequence's rows in original order, from rows in the order of DualChunkSwap shards."""
    out = np.empty_like(x)
    for start, stop in pairwise(cu_seqlens):
        out[start:stop][np.concatenate(dual_chunk_swap(stop - start, cp_size))] = x[start:stop]
    return out


def redo_attention_load_balancing(x: np.ndarray, cp_size: int, cu_seqlens: Offsets) -> np.ndarray:
    """Each sequence's rows in the order of DualChunkSwap shards, from rows in original order."""
    rows = [x[:0]]
    for start, stop in pairwise(cu_seqlens):
        rows += [x[start:stop][share] for share in dual_chunk_swap(stop - start, cp_size)]
    return np.concatenate(rows)


def deinterleave_packed_seqs(x: np.ndarray, cu_seqlens: Offsets, cp_size: int) -> np.ndarray:
    """For each sequence, the shards of rank 0, of rank 1, ...; the offsets refer to one rank's stream."""
    ranks = np.split(x, cp_size)
    return np.concatenate([x[:0], *(rank[start:stop] for start, stop in pairwise(cu_seqlens) for rank in ranks)])


def reinterleave_packed_seqs(x: np.ndarray, cu_seqlens: Offsets, cp_size: int) -> np.ndarray:
    """For each rank, its shards of sequence 0, of sequence 1, ..."""
    ranks = [[x[:0]] for _ in range(cp_size)]
    for start, stop in pairwise(cu_seqlens):
        for shares, share in zip(ranks, np.split(x[cp_size * start : cp_size * stop], cp_size), strict=True):
            shares.append(share)
    return np.concatenate([share for shares in ranks for share in shares])


# Tables of a packed stream: sequence j is cu_padded[j]:cu_padded[j + 1], and its first
# cu_real[j + 1] - cu_real[j] tokens are real.


def sequence_ids(cu_padded: Offsets) -> np.ndarray:
    """The sequence index of each token.

    >>> sequence_ids([0, 2, 2, 5])
    array([0, 0, 2, 2, 2])
    """
    return _joined([np.full(stop - start, j) for j, (start, stop) in enumerate(pairwise(cu_padded))])


def position_ids(cu_padded: Offsets) -> np.ndarray:
    """The position of each token in its sequence, padding included.

    >>> position_ids([0, 2, 2, 5])
    array([0, 1, 0, 1, 2])
    """
    return _joined([np.arange(stop - start) for start, stop in pairwise(cu_padded)])


def padding_mask(cu_padded: Offsets, cu_real: Offsets) -> np.ndarray:
    """True for padding: False for the real tokens of each sequence, then True up to its end.

    >>> padding_mask([0, 2, 5], [0, 2, 3])
    array([False, False, False,  True,  True])
    """
    masks = [np.zeros(0, bool)]
    for (start, stop), (first, end) in zip(pairwise(cu_padded), pairwise(cu_real), strict=True):
        real = end - first
        masks.append(np.array([False] * real + [True] * (stop - start - real), bool))
    return np.concatenate(masks)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int64)


# Columns of a Mamba2 projection, by splitting z, x, B, C and dt.


def projection_columns(num_heads: int, head_dim: int, n_groups: int, d_state: int, world: int) -> list[np.ndarray]:
    """Rank r has its heads' columns of z, x and dt, and the columns of B and C of the groups that these heads read.

    >>> projection_columns(4, 1, 2, 1, 4)[3]
    array([ 3,  7,  9, 11, 15])
    """
    inner, shared = num_heads * head_dim, n_groups * d_state
    columns = np.arange(2 * inner + 2 * shared + num_heads, dtype=np.int64)
    z, x, b, c, dt = np.split(columns, np.cumsum([inner, inner, shared, shared]))
    return _columns_of_ranks(num_heads, n_groups, world, heads=(z, x), groups=(b, c), last=(dt,))


def conv_channels(num_heads: int, head_dim: int, n_groups: int, d_state: int, world: int) -> list[np.ndarray]:
    """The convolution's channels x, B and C on each rank, as in `projection_columns`.

    >>> conv_channels(4, 1, 2, 1, 4)[1]
    array([1, 4, 6])
    """
    inner, shared = num_heads * head_dim, n_groups * d_state
    x, b, c = np.split(np.arange(inner + 2 * shared, dtype=np.int64), np.cumsum([inner, shared]))
    return _columns_of_ranks(num_heads, n_groups, world, heads=(x,), groups=(b, c), last=())


def _columns_of_ranks(num_heads: int, n_groups: int, world: int, *, heads, groups, last) -> list[np.ndarray]:
    """The columns of each rank, from its heads and the groups that these read."""
    ranks = []
    for heads_of_rank in np.split(np.arange(num_heads), world):
        # If several ranks have heads of one group, each has a copy of the group's columns.
        read = np.unique(heads_of_rank // (num_heads // n_groups))
        parts = [part.reshape(num_heads, -1)[heads_of_rank] for part in heads]
        parts += [part.reshape(n_groups, -1)[read] for part in groups]
        parts += [part.reshape(num_heads, -1)[heads_of_rank] for part in last]
        ranks.append(np.concatenate([part.ravel() for part in parts]))
    return ranks
