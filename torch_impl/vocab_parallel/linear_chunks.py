"""Logits of hidden states, one chunk of positions at a time, forward and backward.

Every rank has all hidden states [s b d] and its own rows of the weight [v d]; rows of logits are in the order of
the hidden states, position by position. Matrix products run in the input dtype, the softmax in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.asked import Asked
from torch_impl.vocab_parallel.joint import Plan, chosen, rows_at_once, write_gradient
from torch_impl.vocab_parallel.rows import row_blocks

# Logits of an automatic chunk, counted in float32; it has so many rows at least, for the sake of the products.
CHUNK_BYTES = {"cpu": 32 << 20}
CHUNK_BYTES_ELSEWHERE = 256 << 20
FEWEST_ROWS = 128
# A chunk's rows are whole as far as a rank goes: what the ranks tell each other is exchanged once, after all chunks.
PLAN = Plan("vocab_parallel.linear_logprob", None, whole_rows=True)


def chunk_positions(hidden: Float[Tensor, "s b d"], width: int, chunk_size: int | None) -> int:
    """Positions of one chunk: `chunk_size`, or the largest power of two whose logits stay within the limit."""
    s, b = hidden.shape[:2]
    if chunk_size is None:
        rows = _limit(hidden.device) // (4 * max(width, 1))
        fitting = max(rows // max(b, 1), 1)
        chunk_size = max(1 << (fitting.bit_length() - 1), -(-FEWEST_ROWS // max(b, 1)))
    return max(min(chunk_size, s), 1)


def local_statistics(
    hidden: Float[Tensor, "s b d"], weight: Float[Tensor, "v d"], column: Int[Tensor, "n 1"], positions: int
) -> Float[Tensor, "3 n"]:
    """What this rank knows of each row: m_r, R_r and the target's logit."""
    found = torch.empty(3, len(column), dtype=accumulator(hidden.dtype), device=hidden.device)
    for part, rows in _chunks(hidden, positions):
        _put_statistics(found, rows @ weight.T, column, part)
    return found


def gradients(
    hidden: Float[Tensor, "s b d"],
    weight: Float[Tensor, "v d"],
    asked: Asked,
    whole: st.Normaliser,
    positions: int,
    wanted: tuple[bool, bool],
) -> tuple[Float[Tensor, "s b d"] | None, Float[Tensor, "v d"] | None]:
    """(this rank's term of d hidden, d weight), None where not wanted; of the same chunks as the forward."""
    of_hidden, of_weight = wanted
    d_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if of_hidden else None
    # A sum over chunks: kept in float32, so that many small chunks are as good as one.
    total = torch.zeros(weight.shape, dtype=accumulator(weight.dtype), device=weight.device) if of_weight else None
    for part, rows in _chunks(hidden, positions):
        d_logits = rows @ weight.T
        _turn_into_gradient(d_logits, asked, whole, part)
        if d_hidden is not None:
            torch.mm(d_logits, weight, out=d_hidden.view(-1, hidden.shape[-1])[part])
        if total is not None:
            _add_product(total, d_logits, rows)
        del d_logits  # before the next chunk's are made
    return d_hidden, None if total is None else total.to(weight.dtype)


# Functions of their own, so that no block outlives its chunk: two chunks of logits would be alive.
def _put_statistics(
    found: Float[Tensor, "3 n"], logits: Float[Tensor, "m v"], column: Int[Tensor, "n 1"], part: slice
) -> None:
    """Statistics of a chunk's rows."""
    local = chosen(st.local_statistics, PLAN, logits)
    for own, block in _blocks(logits, part):
        found[:, own] = local(block, column[own], 1.0, False)


def _turn_into_gradient(logits: Float[Tensor, "m v"], asked: Asked, whole: st.Normaliser, part: slice) -> None:
    """Logits of a chunk, overwritten by their gradient, which is rounded once."""
    write = chosen(write_gradient, PLAN, logits)
    for own, block in _blocks(logits, part):
        write(block, block, 1.0, True, asked.rows(own), whole.largest[own], whole.log_total[own], None, None)


def _add_product(total: Float[Tensor, "v d"], d_logits: Float[Tensor, "m v"], rows: Float[Tensor, "m d"]) -> None:
    """total += d_logits^T rows, the product in its own dtype and of bounded size."""
    if total.dtype == rows.dtype:
        total.addmm_(d_logits.T, rows)
        return
    step = max(1, _limit(total.device) // (4 * max(total.shape[1], 1)))
    for some, columns in zip(total.split(step), d_logits.split(step, dim=1), strict=True):
        some += columns.T @ rows


def _chunks(hidden: Float[Tensor, "s b d"], positions: int) -> Iterator[tuple[slice, Float[Tensor, "m d"]]]:
    """Rows of so many positions, each chunk with the slice of all rows that it is."""
    done = 0
    for chunk in hidden.split(positions):
        rows = chunk.reshape(-1, hidden.shape[-1])
        yield slice(done, done + len(rows)), rows
        done += len(rows)


def _blocks(logits: Float[Tensor, "m v"], part: slice) -> Iterator[tuple[slice, Float[Tensor, "n v"]]]:
    """Row blocks of a chunk's logits, each with the slice of all rows that it is."""
    for own, block in row_blocks(logits, rows_at_once(PLAN, logits)):
        yield slice(part.start + own.start, part.start + own.stop), block


def _limit(device: torch.device) -> int:
    return CHUNK_BYTES.get(device.type, CHUNK_BYTES_ELSEWHERE)
