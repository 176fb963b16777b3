"""Rows of packed sequences as one stream, one sequence at a time; and what stands at each position of it.

Row b holds sequence j in a slot of `seq_lens_padded[b][j]` tokens, `seq_lens[b][j]` of them real. `fill` says none.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Rows = Sequence[Sequence[int]]


def slots(size: int, seq_lens: Rows, seq_lens_padded: Rows, fill: int) -> list[tuple[int, int]]:
    """(real, padded) length of each sequence; what a row of `size` tokens has left over joins its last slot.

    >>> slots(8, [[3, 2], [8, -1]], [[4, 2], [8, -1]], -1)
    [(3, 4), (2, 4), (8, 8)]
    """
    found = []
    for real_row, padded_row in zip(seq_lens, seq_lens_padded, strict=True):
        row = [(real, padded) for real, padded in zip(real_row, padded_row, strict=True) if real != fill]
        if row:
            real, padded = row.pop()
            row.append((real, padded + size - sum(slot for _, slot in row) - padded))
        found += row
    return found


def stream(found: Sequence[tuple[int, int]]) -> dict[str, list]:
    """Offsets, positions and padding mask of slots laid end to end.

    >>> stream([(1, 2), (3, 3)])["cu_seqlens_padded"]
    [0, 2, 5]
    """
    out: dict[str, list] = {"cu_seqlens": [0], "cu_seqlens_padded": [0], "position_ids": [], "padding_mask": []}
    for real, padded in found:
        out["cu_seqlens"].append(out["cu_seqlens"][-1] + real)
        out["cu_seqlens_padded"].append(out["cu_seqlens_padded"][-1] + padded)
        for place in range(padded):
            out["position_ids"].append(place)
            out["padding_mask"].append(place >= real)
    return out


def tables(size: int, padded: Int[Array, " q"], real: Int[Array, " q"]) -> tuple[Int[Array, " t"], Bool[Array, " t"]]:
    """Place in its sequence, and whether it is padding, of each of `size` positions.

    A position stands in the sequence that as many slots end at or before.
    """
    position, ends = jnp.arange(size), jnp.cumsum(padded)
    sequence = (ends[None, :] <= position[:, None]).sum(1)
    place = position - (ends - padded)[sequence]
    return place, place >= real[sequence]
