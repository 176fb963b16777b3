"""Log-probability and negative entropy of sharded rows, forward and backward read each row block from memory once.

Rank r has columns [vocab_start, vocab_end) of each row. Every rank has the ids to look up: one target per row, or k.
With y = z / temperature, lse = log sum_v exp(y_v) and p = exp(y - lse),

    log p[t] = y_t - lse,     h = sum_v p_v log p_v
    d z = (sum_t g_t (1[v=t] - p) + g_h p (log p - h)) / temperature

Forward: one read of the logits, one all_gather. Backward: one read, one write, no collective. Backward recomputes p
from the logits and the saved normaliser, so that only the logits themselves are saved at their size.

Letters and names in code: m `row_max`, b = (z - m) / temperature shifted logits, lse = m / temperature + `log_row_sum`,
d = sum_v p_v b_v `shifted_mean`, g cotangents. `column` has the ids' columns in this rank's shard: [n, k] for k ids in
each of n rows. `statistics` describes how m, the row sum and d are computed.

Read `forward`, then `backward`, then `write_gradient`. Nothing is validated here: the public functions did so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl import kernels
from torch_impl.collectives import accumulator, large_tensors
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.vocab_parallel import long_rows, statistics
from torch_impl.vocab_parallel.statistics import row_blocks, rows_of, rows_per_block

NOTHING_SAVED = "inference_only=True saved nothing for backward; call with inference_only=False"


class LogprobOptions(NamedTuple):
    """All arguments except the tensors.

    With `has_id_dim` the ids have an extra last dim: k ids per row. Without `normalised` the result is y at the ids
    instead of log p. `chunk_size` sets the rows that are computed at a time: `chunk_size * b` for logits [b, s, v].
    These are consecutive among the b * s rows, so a block may hold different positions of each batch entry.
    """

    group: ProcessGroup | None  # None: one rank has full rows
    vocab_start: int = 0
    vocab_end: int = 0
    temperature: float = 1.0
    with_entropy: bool = False
    chunk_size: int | None = None
    inference_only: bool = False
    inplace_gradient: bool = False
    backend: str = "auto"
    has_id_dim: bool = False
    normalised: bool = True


class FusedLogprob(torch.autograd.Function):
    """`forward` and `backward`, for `.apply(logits, ids or None, options)`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor | None, options: LogprobOptions) -> tuple[Tensor, ...]:
        return forward(ctx, logits, ids, options)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return backward(ctx, *cotangents), None, None


def forward(ctx: Any, logits: Tensor, ids: Tensor | None, options: LogprobOptions) -> tuple[Tensor, ...]:
    """(log-probabilities in the ids' shape, if there are ids; sum p log p of each row, if `with_entropy`)."""
    # 1. This rank's column of each id, [n, k]; a target is one id per row.
    column, has_full_rows = None, statistics.has_full_rows(options.group)
    if ids is not None:
        id_rows = ids.reshape(logits.shape[:-1].numel(), ids.shape[-1] if options.has_id_dim else 1)
        absent = statistics.OUT_OF_VOCABULARY if has_full_rows else statistics.ON_ANOTHER_RANK
        column = statistics.local_column(id_rows, options.vocab_start, options.vocab_end, absent)
    # 2. Statistics of this rank's columns, then of every rank's, and the normaliser of full rows.
    stack = statistics.gather_statistics(row_statistics(logits, column, options), options.group)
    id_count = None if column is None else column.shape[-1]
    row_max_r, row_sum_m1_r, z_t_r, shifted_mean_r = statistics.by_name(stack, id_count, options.with_entropy)
    normaliser = statistics.global_normaliser(row_max_r, row_sum_m1_r, options.temperature)
    # 3. The outputs. An id whose logit no rank has is outside the vocabulary; its score is 0.
    outputs, shifted_mean, leading = [], None, logits.shape[:-1]
    if ids is not None and column is not None and z_t_r is not None:
        z_t = statistics.global_target_logit(z_t_r)
        if not has_full_rows:
            column.masked_fill_((z_t == math.inf).mT, statistics.OUT_OF_VOCABULARY)
        normaliser_of_ids = [x.view(*leading, 1) if options.has_id_dim else x.view(leading) for x in normaliser]
        outputs.append(_score(z_t.mT.reshape(ids.shape), statistics.Normaliser(*normaliser_of_ids), options))
    if shifted_mean_r is not None:
        shifted_mean = statistics.global_shifted_mean(
            row_max_r, row_sum_m1_r, shifted_mean_r, normaliser, options.temperature
        )
        outputs.append(shifted_mean.view(leading) - normaliser.log_row_sum.view(leading))
    # 4. Save the logits by reference, two numbers per token (three with entropy) of 4 bytes (float64 logits: 8), and
    #    an int32 column of 4 bytes per id.
    ctx.options = options
    ctx.set_materialize_grads(False)  # an unused output has cotangent None, not zeros that would cost a pass
    if not options.inference_only:
        ctx.save_for_backward(logits, *normaliser, column, shifted_mean)
    return tuple(outputs)


def backward(ctx: Any, *cotangents: Tensor | None) -> Tensor:
    """The gradient of the logits, in their dtype, from the cotangents of `forward`'s outputs."""
    options: LogprobOptions = ctx.options
    if options.inference_only:
        raise RuntimeError(NOTHING_SAVED)
    logits, row_max, log_row_sum, column, shifted_mean = ctx.saved_tensors
    logits = logits.detach()  # shares the version counter, so autograd notices if the gradient overwrites the logits
    shape = row_max.numel(), logits.shape[-1]
    gradient = None if options.inplace_gradient else large_tensors.empty(shape, logits.dtype, logits.device)
    # 1. The cotangents of the outputs, row by row; None for an unused output.
    g_logprob = None if column is None else cotangents[0]
    g_entropy = cotangents[-1] if options.with_entropy else None
    entropy = None if g_entropy is None else EntropyCotangent(shifted_mean, g_entropy.reshape(-1))
    at_ids = None
    if g_logprob is not None and column is not None and column.numel():
        at_ids = id_cotangents(column, g_logprob.reshape(column.shape))
    # 2. The gradient, one row block at a time.
    backend = backend_of(options, logits)
    write = implementation_of(write_gradient, backend)
    for row_slice, block in row_blocks(logits, rows_per_block_of_backend(logits, options.chunk_size, backend)):
        out = block if gradient is None else rows_of(gradient, row_slice)
        normaliser = statistics.Normaliser(rows_of(row_max, row_slice), rows_of(log_row_sum, row_slice))
        cotangents_of_rows = (None if x is None else x.rows(row_slice) for x in (at_ids, entropy))
        write(out, block, normaliser, *cotangents_of_rows, options.temperature, options.normalised)
    return logits if gradient is None else gradient.view(logits.shape)


def write_gradient(
    out: Float[Tensor, "n v"],
    block: Float[Tensor, "n v"],
    normaliser: statistics.Normaliser,
    at_ids: IdCotangents | None,
    entropy: EntropyCotangent | None,
    temperature: float,
    normalised: bool,
    write_terms: Callable[..., None] = long_rows.write_terms,
) -> None:
    """out = (sum_t g_t (1[v=t] - p) + g_h p (log p - h)) / temperature; out may be the block. Steps 1 to 5.

    Without `normalised` the term -p is absent. log p - h is computed as (z - m) / temperature - d, so that a row of
    equal logits has a gradient of exactly 0.
    """
    if block.shape[-1] == 0:
        return
    # 1. Read the logits at the ids before `out` overwrites the block.
    index = z_t = None
    if at_ids is not None:
        index = statistics.index_of(at_ids.column)
        z_t = block.gather(-1, index).to(normaliser.row_max.dtype)
    # 2. The gradient of every column, as if no id were there.
    g = at_ids.g_total if at_ids is not None and normalised else None
    gradient = _dense_gradient(out, block, normaliser, g, entropy, temperature, write_terms)
    # 3. Overwrite the columns of the ids.
    if at_ids is not None and index is not None and z_t is not None:
        at_columns = _gradient_at_ids(z_t, normaliser, at_ids, entropy, temperature, normalised)
        gradient = _scatter_at_ids(gradient, index, at_columns.to(gradient.dtype))
    # 4. Set a row to 0 if all its ids are outside the vocabulary (such as -100) and its entropy has cotangent 0. Set,
    #    not multiplied, since 0 * NaN is NaN. Without ids or without entropy, the other condition decides. A row with
    #    an id in the vocabulary is never set to 0, even if the id's cotangent is 0.
    is_zero = None if at_ids is None else at_ids.looks_up_nothing
    if entropy is not None:
        is_zero = entropy.is_unused if is_zero is None else is_zero & entropy.is_unused
    if is_zero is not None:
        gradient = zero_rows(gradient, is_zero)
    # 5. Round once, to the dtype of the output. Steps 2 and 3 have divided by the temperature.
    if gradient is not out:
        out.copy_(gradient)


def _write_gradient_compiled(out: Tensor, block: Tensor, *more: Any) -> None:
    """`write_gradient` under the compiler; for long rows only step 2 is compiled.

    A compiled pass that also compares each column with the row's id took 26 ms on one core for 512 float32 rows of
    65,536 columns; without the comparison it took 14 ms.
    """
    if long_rows.applies_to(block):
        write_gradient(out, block, *more, write_terms=kernels.compiled(long_rows.write_fused_terms))
    else:
        kernels.compiled(write_gradient)(out, block, *more)


def _dense_gradient(
    out: Float[Tensor, "n v"],
    block: Float[Tensor, "n v"],
    normaliser: statistics.Normaliser,
    g: Float[Tensor, " n"] | None,
    entropy: EntropyCotangent | None,
    temperature: float,
    write_terms: Callable[..., None],
) -> Float[Tensor, "n v"]:
    """p (g_h (log p - h) - g) / temperature: the gradient at columns without an id, in `out` or in a new tensor.

    Step 2 writes long rows to `out`, whatever its dtype. It writes other rows to `out` in eager mode, if `out` has the
    accumulation dtype and there is no entropy.

    With b = (z - m) / temperature and log p - h = b - d the gradient is exp(b) times a linear function of b. Slope and
    intercept are computed once per row:

        exp(b) (slope b + intercept),   slope = g_h / denominator,   intercept = -(g + g_h d) / denominator
    """
    row_max = normaliser.row_max.unsqueeze(-1)
    # 1. p = exp(b) / exp(log_row_sum), and all is divided by the temperature. Step 2 computes b in base 2, log2(e) b,
    #    so the slope is divided by log2(e).
    minus_denominator, row_slope = normaliser.log_row_sum.exp().mul_(-temperature), None
    if entropy is not None:
        row_slope = (entropy.g / (-statistics.LOG2_E * minus_denominator)).unsqueeze(-1)
        d, g_h = entropy
        minus_intercept = d * g_h if g is None else torch.addcmul(g, d, g_h)
    elif g is not None:
        minus_intercept = g
    else:
        return torch.zeros(block.shape, dtype=row_max.dtype, device=block.device)
    row_intercept = (minus_intercept / minus_denominator).unsqueeze(-1)
    # 2. exp(b) (slope b + intercept).
    if long_rows.applies_to(block):
        write_terms(out, block, row_max, temperature, row_intercept, row_slope)
        return out
    buffer = out if out.dtype == row_max.dtype and row_slope is None else None
    shifted = statistics.shifted_logits_base_2(block, row_max, temperature, buffer)
    if row_slope is None:
        return shifted.exp2_().mul_(row_intercept)
    terms = shifted.exp2()
    return statistics.with_floor(shifted).mul_(row_slope).add_(row_intercept).mul_(terms)


def _score(z_t: Float[Tensor, "*a"], normaliser: statistics.Normaliser, options: LogprobOptions) -> Float[Tensor, "*a"]:
    """log p of the looked-up logits, or y without `normalised`."""
    if options.normalised:
        return statistics.logprob_of(z_t, normaliser, options.temperature)
    return statistics.zero_outside_vocabulary(z_t, z_t / options.temperature)


class EntropyCotangent(NamedTuple):
    """The cotangent g of each row's entropy, and the mean shifted logit d that its gradient needs."""

    shifted_mean: Float[Tensor, " n"]
    g: Float[Tensor, " n"]

    @property
    def is_unused(self) -> Bool[Tensor, "n 1"]:
        return (self.g == 0).unsqueeze(-1)

    def rows(self, row_slice: slice) -> EntropyCotangent:
        """Some of the rows."""
        return EntropyCotangent(rows_of(self.shifted_mean, row_slice), rows_of(self.g, row_slice))


class IdCotangents(NamedTuple):
    """Sums of the cotangents of the k ids of each row, as the gradient needs them.

    For each id, g_same sums the cotangents of the row's equal ids and g_other those of its different ids; g_total sums
    all k. The gradient at an id's column is g_same (1 - p) - p g_other, and -p g_total at any other column. Each sum is
    added up separately: a difference of two sums would cancel as p -> 1. Ids may be in any order. An id of another rank
    is replaced by an id of this rank, if the row has one.
    """

    column: Int[Tensor, "n k"]
    g_same: Float[Tensor, "n k"]
    g_other: Float[Tensor, "n k"] | None  # None where k is 1
    g_total: Float[Tensor, " n"]
    looks_up_nothing: Bool[Tensor, "n 1"]  # all ids of the row are outside the vocabulary

    def rows(self, row_slice: slice) -> IdCotangents:
        """Some of the rows."""
        if row_slice.stop - row_slice.start == len(self.column):
            return self
        g_other = None if self.g_other is None else self.g_other[row_slice]
        return IdCotangents(
            self.column[row_slice],
            self.g_same[row_slice],
            g_other,
            self.g_total[row_slice],
            self.looks_up_nothing[row_slice],
        )


def id_cotangents(column: Int[Tensor, "n k"], g: Float[Tensor, "n k"]) -> IdCotangents:
    """The sums of the cotangents g of k >= 1 ids per row; ids outside the vocabulary add nothing."""
    is_outside = column == statistics.OUT_OF_VOCABULARY
    g = g.masked_fill(is_outside, 0.0)
    if column.shape[-1] == 1:
        return IdCotangents(column, g, None, g.squeeze(-1), is_outside)
    # 1. After sorting, equal ids are adjacent, at indices [first, past). All ids of other ranks are -1 and count as
    #    equal. This is correct: the gradient at a column of this rank needs only the sum of their cotangents, as a part
    #    of g_other if the row has an id here, else as g_same + g_other at column 0.
    column = column.contiguous()
    in_order, order = column.sort(-1)
    first = torch.searchsorted(in_order, column)
    past = torch.searchsorted(in_order, column, right=True)
    # 2. Sum the cotangents of smaller ids from the front, and the cotangents of larger ids from the back.
    sorted_g = g.gather(-1, order)
    before = F.pad(sorted_g.cumsum(-1), (1, 0)).gather(-1, first)
    after = F.pad(sorted_g.flip(-1).cumsum(-1).flip(-1), (0, 1)).gather(-1, past)
    g_same = torch.zeros_like(g).scatter_add_(-1, first, g).gather(-1, first)
    # 3. One scatter writes the gradient at all k ids, so an id of another rank must not overwrite the gradient of an id
    #    of this rank. It is replaced by the row's largest id, the last in sorted order.
    index = torch.arange(column.shape[-1], device=column.device)
    source = torch.where(column >= 0, index, order[:, -1:])
    g_other = (before + after).gather(-1, source)
    looks_up_nothing = is_outside.all(-1, keepdim=True)
    return IdCotangents(column.gather(-1, source), g_same.gather(-1, source), g_other, g.sum(-1), looks_up_nothing)


def _gradient_at_ids(
    z_t: Float[Tensor, "n k"],
    normaliser: statistics.Normaliser,
    at_ids: IdCotangents,
    entropy: EntropyCotangent | None,
    temperature: float,
    normalised: bool,
) -> Float[Tensor, "n k"]:
    """The gradient at each id: (g_same (1 - p) - p g_other + g_h p (log p - h)) / temperature.

    If this rank has no id of the row, column 0 is written with the gradient of a column without an id,
    (-p g + g_h p (log p - h)) / temperature.
    """
    is_here = at_ids.column >= 0
    if not normalised and entropy is None:
        return at_ids.g_same.where(is_here, 0.0).div_(temperature)
    b = statistics.shifted_logits(z_t, normaliser.row_max.unsqueeze(-1), temperature)
    log_p = b - normaliser.log_row_sum.unsqueeze(-1)
    p = log_p.exp()
    if normalised:
        # -expm1(log p), since 1 - p loses all digits as p -> 1. It overwrites log_p, which is not needed any more.
        gradient = torch.where(is_here, log_p.expm1_(), p).neg_().mul_(at_ids.g_same)
        if at_ids.g_other is not None:
            gradient -= p * at_ids.g_other
    else:
        gradient = at_ids.g_same.where(is_here, 0.0)
    if entropy is not None:
        # A masked logit has gradient 0: 0 log 0 is 0.
        derivative = p * (b.clamp_min(statistics.LOWEST_SHIFTED) - entropy.shifted_mean.unsqueeze(-1))
        gradient += derivative * entropy.g.unsqueeze(-1)
    return gradient if temperature == 1.0 else gradient.div_(temperature)


def _scatter_at_ids(
    gradient: Float[Tensor, "n v"], index: Int[Tensor, "n k"], values: Float[Tensor, "n k"]
) -> Float[Tensor, "n v"]:
    """Write `values` at the ids' columns, in place in eager mode; the compiler fuses a comparison but not a scatter."""
    if torch.compiler.is_compiling() and index.shape[-1] == 1:
        return torch.where(torch.arange(gradient.shape[-1], device=gradient.device) == index, values, gradient)
    if gradient.is_cpu and gradient.itemsize == 2:  # on a CPU, scatter_ of a 16-bit float reads and writes all elements
        gradient.view(torch.int16).scatter_(-1, index, values.view(torch.int16))
        return gradient
    return gradient.scatter_(-1, index, values)


def zero_rows(x: Float[Tensor, "n v"], rows: Bool[Tensor, "n 1"]) -> Float[Tensor, "n v"]:
    """Set some rows to 0, even if they are NaN; in place in eager mode."""
    if torch.compiler.is_compiling():
        return x.masked_fill(rows, 0.0)
    # Usually no row is set, and on a CPU masked_fill_ reads all rows and takes ten times as long as a plain pass. The
    # type is tested exactly: a fake tensor reports the CPU and has no values.
    if type(rows) is Tensor and x.is_cpu:
        return x.index_fill_(0, rows.nonzero().select(1, 0), 0.0)
    return x.masked_fill_(rows, 0.0)


def row_statistics(logits: Tensor, column: Tensor | None, options: LogprobOptions) -> Float[Tensor, "f n"]:
    """Statistics of this rank's columns for every row, one row block at a time."""
    backend, blocks = backend_of(options, logits), []
    local = implementation_of(statistics.local_statistics, backend)
    for row_slice, block in row_blocks(logits, rows_per_block_of_backend(logits, options.chunk_size, backend)):
        block_column = None if column is None else rows_of(column, row_slice)
        blocks.append(local(block, block_column, options.temperature, options.with_entropy))
    if blocks:
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)
    count = 2 + (0 if column is None else column.shape[-1]) + options.with_entropy
    return torch.empty(count, 0, dtype=accumulator(logits.dtype), device=logits.device)


def rows_per_block_of_backend(logits: Tensor, chunk_size: int | None, backend: str) -> int:
    """Rows of one block for this backend.

    A Triton kernel has no working set in memory and takes all rows. Compiled operations are fused and leave no
    intermediates that must fit a cache, so a block has BLOCK_BYTES_ELSEWHERE on every device. Eager operations read
    long rows on a CPU in tiles (`long_rows.rows_per_block`), and all other rows as in `statistics.rows_per_block`.
    """
    if backend == "triton":
        return max(1, math.prod(logits.shape[:-1]))
    if backend == "compile" and chunk_size is None:
        return max(1, statistics.BLOCK_BYTES_ELSEWHERE // max(1, logits.shape[-1] * accumulator(logits.dtype).itemsize))
    if backend == "eager" and chunk_size is None and long_rows.applies_to(logits):
        return long_rows.rows_per_block(logits.shape[-1], accumulator(logits.dtype))
    return rows_per_block(logits, chunk_size)


def backend_of(options: LogprobOptions, logits: Tensor) -> str:
    """The backend to use: eager, compile or triton. `auto` means Triton on CUDA and eager elsewhere."""
    if options.backend != "auto":
        return options.backend
    return kernels.checked_backend("auto", "logits", logits) if logits.is_cuda else "eager"


def block_function(f: Callable[..., Any], options: LogprobOptions, logits: Tensor) -> Callable[..., Any]:
    """The implementation of `local_statistics` or `write_gradient` for these options on this device."""
    return implementation_of(f, backend_of(options, logits))


def implementation_of(f: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A function of row blocks as the backend runs it: itself (eager), compiled, or its Triton kernel."""
    if backend == "eager":
        return f
    if backend == "compile":
        return _write_gradient_compiled if f is write_gradient else kernels.compiled(f)
    from torch_impl.kernels import softmax  # imported here, since it needs triton

    return {statistics.local_statistics: softmax.local_statistics, write_gradient: softmax.write_gradient}[f]
