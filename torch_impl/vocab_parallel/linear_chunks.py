"""Logits from hidden states and a rank's rows of the output weight, in chunks of positions or all at once.

Forward computes the statistics of the logits. Backward computes the gradient of the logits, and its products with
weight and hidden states. Rows of logits follow the hidden states, position by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator, large_tensors
from torch_impl.vocab_parallel import statistics
from torch_impl.vocab_parallel.fused_logprob import (
    EntropyCotangent,
    IdCotangents,
    LogprobOptions,
    backend_of,
    block_function,
    rows_per_block_of_backend,
    write_gradient,
)
from torch_impl.vocab_parallel.statistics import row_blocks

# Bytes of the logits of an automatic chunk; it has at least MIN_CHUNK_ROWS rows, so that the products are efficient.
CHUNK_BYTES = {"cpu": 32 << 20}
CHUNK_BYTES_ELSEWHERE = 256 << 20
MIN_CHUNK_ROWS = 128
SAVED_BYTES = 256 << 20  # logits up to this size are saved for backward instead of recomputed
# Chunks are scored without a group: the ranks exchange statistics once, after all chunks.
FULL_ROWS = LogprobOptions(None)


def fit_beside(weight: Float[Tensor, "v d"], hidden: Float[Tensor, "s b d"]) -> bool:
    """Whether all logits take no more memory than the weight, or than its gradient, and at most SAVED_BYTES."""
    rows = hidden.shape[:2].numel()
    if torch.compiler.is_compiling():  # a compiled backward must not overwrite a saved tensor
        return False
    return 0 < rows <= hidden.shape[2] and rows * len(weight) * hidden.itemsize <= SAVED_BYTES


def all_logits(hidden: Float[Tensor, "s b d"], weight: Float[Tensor, "v d"]) -> Float[Tensor, "n v"]:
    """All logits, hidden weight^T, position by position."""
    rows = hidden.flatten(0, 1)
    return torch.mm(rows, weight.T, out=large_tensors.empty((len(rows), len(weight)), rows.dtype, rows.device))


def chunk_positions(hidden: Float[Tensor, "s b d"], width: int, chunk_size: int | None) -> int:
    """Positions of one chunk: `chunk_size`, or the largest power of two whose logits stay within the limit."""
    s, b = hidden.shape[:2]
    if chunk_size is None:
        rows = _limit(hidden.device) // (hidden.itemsize * max(width, 1))
        fitting = max(rows // max(b, 1), 1)
        chunk_size = max(1 << (fitting.bit_length() - 1), -(-MIN_CHUNK_ROWS // max(b, 1)))
    return max(min(chunk_size, s), 1)


def chunk_statistics(
    hidden: Float[Tensor, "s b d"],
    weight: Float[Tensor, "v d"],
    logits: Float[Tensor, "n v"] | None,
    column: Int[Tensor, "n 1"],
    positions: int,
    temperature: float,
    with_entropy: bool,
) -> Float[Tensor, "f n"]:
    """This rank's statistics of each row: m_r, R_r, the target's logit, with entropy the mean shifted logit.

    `logits` are all logits; None computes them chunk by chunk.
    """
    rank_statistics = torch.empty(3 + with_entropy, len(column), dtype=accumulator(hidden.dtype), device=hidden.device)
    for row_slice, rows in _chunks(hidden, positions):
        chunk = rows @ weight.T if logits is None else logits
        _put_statistics(rank_statistics, chunk, column, row_slice, temperature)
        del chunk  # before the next one is allocated
    return rank_statistics


class RowGradients(NamedTuple):
    """The inputs of the gradient of each row of logits, except the logits."""

    at_ids: IdCotangents
    entropy: EntropyCotangent | None
    normaliser: statistics.Normaliser
    temperature: float


def gradients(
    hidden: Float[Tensor, "s b d"],
    weight: Float[Tensor, "v d"],
    logits: Float[Tensor, "n v"] | None,
    of_rows: RowGradients,
    positions: int,
    needs_gradient: tuple[bool, bool],
) -> tuple[Float[Tensor, "s b d"] | None, Float[Tensor, "v d"] | None]:
    """(this rank's term of d hidden, d weight), None where not needed, from the same chunks as in forward.

    `logits` are all logits and are overwritten; None computes them chunk by chunk.
    """
    of_hidden, of_weight = needs_gradient
    d_hidden = large_tensors.empty(hidden.shape, hidden.dtype, hidden.device) if of_hidden else None
    # d weight is a sum over chunks, in float32 so that many small chunks are as exact as one. One chunk needs no sum.
    dtype = weight.dtype if positions >= len(hidden) else accumulator(weight.dtype)
    total = large_tensors.empty(weight.shape, dtype, weight.device) if of_weight else None
    for row_slice, rows in _chunks(hidden, positions):
        d_logits = rows @ weight.T if logits is None else logits
        _turn_into_gradient(d_logits, of_rows, row_slice)
        if d_hidden is not None:
            torch.mm(d_logits, weight, out=d_hidden.view(-1, hidden.shape[-1])[row_slice])
        if total is not None:
            _add_product(total, d_logits, rows, is_first=row_slice.start == 0)
        del d_logits  # before the next ones are allocated
    return d_hidden, None if total is None else total.to(weight.dtype)


# These are separate functions so that no block outlives its chunk, which would keep two chunks of logits in memory.
def _put_statistics(
    rank_statistics: Float[Tensor, "f n"],
    logits: Float[Tensor, "m v"],
    column: Int[Tensor, "n 1"],
    row_slice: slice,
    temperature: float,
) -> None:
    """Write the statistics of a chunk's rows."""
    with_entropy = len(rank_statistics) > 3
    local = block_function(statistics.local_statistics, FULL_ROWS, logits)
    for rows, block in _blocks(logits, row_slice):
        rank_statistics[:, rows] = local(block, column[rows], temperature, with_entropy)


def _turn_into_gradient(logits: Float[Tensor, "m v"], row_gradients: RowGradients, row_slice: slice) -> None:
    """Overwrite a chunk's logits by their gradient, which is rounded once."""
    at_ids, entropy, normaliser, temperature = row_gradients
    write = block_function(write_gradient, FULL_ROWS, logits)
    for rows, block in _blocks(logits, row_slice):
        of_rows = statistics.Normaliser(normaliser.row_max[rows], normaliser.log_row_sum[rows])
        of_entropy = None if entropy is None else entropy.rows(rows)
        write(block, block, of_rows, at_ids.rows(rows), of_entropy, temperature, True)


def _add_product(
    total: Float[Tensor, "v d"], d_logits: Float[Tensor, "m v"], rows: Float[Tensor, "m d"], is_first: bool
) -> None:
    """total += d_logits^T rows; the product has the dtype of its factors; the first one overwrites total."""
    if total.dtype == rows.dtype:
        total.addmm_(d_logits.T, rows, beta=0 if is_first else 1)  # with beta=0 total is not read
        return
    # addmm_ takes one dtype, so the product is a temporary; some rows at a time keep it small.
    step = max(1, _limit(total.device) // (4 * max(total.shape[1], 1)))
    for total_rows, columns in zip(total.split(step), d_logits.split(step, dim=1), strict=True):
        product = columns.T @ rows
        if is_first:
            total_rows.copy_(product)
        else:
            total_rows += product


def _chunks(hidden: Float[Tensor, "s b d"], positions: int) -> Iterator[tuple[slice, Float[Tensor, "m d"]]]:
    """(slice of all rows, the chunk's rows of hidden states) for each chunk of `positions`."""
    done = 0
    for chunk in hidden.split(positions):
        rows = chunk.reshape(-1, hidden.shape[-1])
        yield slice(done, done + len(rows)), rows
        done += len(rows)


def _blocks(logits: Float[Tensor, "m v"], row_slice: slice) -> Iterator[tuple[slice, Float[Tensor, "n v"]]]:
    """(slice of all rows, row block) for each row block of a chunk's logits."""
    for rows, block in row_blocks(logits, rows_per_block_of_backend(logits, None, backend_of(FULL_ROWS, logits))):
        yield slice(row_slice.start + rows.start, row_slice.start + rows.stop), block


def _limit(device: torch.device) -> int:
    return CHUNK_BYTES.get(device.type, CHUNK_BYTES_ELSEWHERE)
