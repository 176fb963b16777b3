"""Log-probability of one target of each row, where one rank has full rows and the call has few logits.

A small call costs what its operations cost to launch, not what they compute. Without blocks, statistics to merge and
several ids of a row, the formulas of `fused_logprob` need less than half as many:

    log p[t] = (z_t - m) / temperature - log(1 + R),     R = sum_v exp(b_v) - 1,     b_v = (z_v - m) / temperature
    d z = g (1[v=t] - p) / temperature

What is rounded, and what rows of -inf, +inf or NaN give, is the same as there; what is saved differs in the column of
an id outside the vocabulary, which is -1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel.statistics import has_full_rows

MAX_LOGITS = 1 << 15  # of a call; of more, the other route's cheaper exponential outweighs its overhead


def applies_to(logits: Tensor, ids: Tensor | None, options: Any) -> bool:
    """Whether a call takes this route instead of that of `fused_logprob`."""
    return (
        ids is not None
        and has_full_rows(options.group)
        and not (options.has_id_dim or options.with_entropy or options.inplace_gradient)
        and options.normalised
        and options.chunk_size is None
        and options.backend in ("auto", "eager")
        and logits.is_cpu
        and 0 < logits.numel() <= MAX_LOGITS
        and options.vocab_start < options.vocab_end
        and not torch.compiler.is_compiling()
    )


def forward(ctx: Any, logits: Tensor, ids: Tensor, options: Any) -> tuple[Tensor]:
    """The log-probability of each id, in the ids' shape."""
    # 1. The column of each id, and which ids are outside the vocabulary.
    column = ids.unsqueeze(-1)
    if options.vocab_start:
        column = column - options.vocab_start
    index = column.clamp(0, options.vocab_end - options.vocab_start - 1)
    is_outside = index != column
    # 2. The largest logit and log(1 + R). A row of -inf is shifted by a finite number, since -inf - -inf is NaN; a row
    #    that has a NaN or +inf has no softmax, and R is NaN.
    wide = logits.to(accumulator(logits.dtype))
    row_max, row_max_column = wide.max(-1, keepdim=True)
    shift = row_max.clamp_min(torch.finfo(wide.dtype).min)
    zero_or_nan = shift - shift  # at the largest logit, whose term is left out; NaN if that is NaN or +inf
    terms = _divide_by_temperature(wide - shift, options).exp_()
    log_row_sum = terms.scatter_(-1, row_max_column, zero_or_nan).sum(-1, keepdim=True).log1p_()
    # 3. The score; that of an id outside the vocabulary is 0.
    score = _divide_by_temperature(wide.gather(-1, index) - row_max, options).sub_(log_row_sum)
    score = score.masked_fill_(is_outside, 0.0).squeeze(-1)
    ctx.options = options
    ctx.set_materialize_grads(False)
    if not options.inference_only:
        ctx.save_for_backward(logits, row_max, log_row_sum, column.masked_fill(is_outside, -1).to(torch.int32))
    return (score,)


def backward(ctx: Any, g: Tensor | None) -> Tensor:
    """d logits, in the logits' dtype."""
    logits, row_max, log_row_sum, column = ctx.saved_tensors
    if g is None:
        return torch.zeros_like(logits)
    minus_g = g.unsqueeze(-1).neg()
    index, is_outside = column.clamp_min(0).long(), column < 0
    # 1. log p of every column; at the id -expm1(log p), not 1 - p, which loses all digits where p is almost 1.
    log_p = _divide_by_temperature(logits.to(row_max.dtype) - row_max, ctx.options).sub_(log_row_sum)
    at_id = log_p.gather(-1, index).expm1_().mul_(minus_g)
    gradient = log_p.exp_().mul_(minus_g).scatter_(-1, index, at_id)
    # 2. The row of an id outside the vocabulary is set to 0, not multiplied by 0, since 0 * NaN is NaN.
    return _divide_by_temperature(gradient.masked_fill_(is_outside, 0.0), ctx.options).to(logits.dtype)


def _divide_by_temperature(x: Tensor, options: Any) -> Tensor:
    """x / temperature, in place."""
    return x if options.temperature == 1.0 else x.div_(options.temperature)
