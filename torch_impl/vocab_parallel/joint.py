"""Log-probability and negative entropy of whole rows, with one joint gradient.

Rank r holds columns [vocab_start, vocab_end) of each row, and every rank has every target. Forward: one
read of the logits, one all_gather. Backward: one read, one write, no collective.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel import arguments as a
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.rows import block_rows, row_blocks

SPENT = "inference_only=True saved nothing for backward; call with inference_only=False"


@dataclass(frozen=True)
class Plan:
    """Everything but the tensors. `function` and `group_name` are what an error calls things."""

    function: str
    group: ProcessGroup | None  # None is for whole rows only
    vocab_start: int = 0
    vocab_end: int = 0
    temperature: float = 1.0
    with_entropy: bool = False
    chunk_size: int | None = None
    inference_only: bool = False
    inplace_gradient: bool = False
    backend: str = "auto"
    group_name: str = "tp_group"
    whole_rows: bool = False


def check(plan: Plan, logits: Tensor, target: Tensor | None) -> None:
    """Refuse what cannot be, before any collective."""
    name = "vocab_parallel_logits"
    if not plan.whole_rows:
        a.checked_tp_group(plan.function, plan.group_name, plan.group)
    a.check_logits(plan.function, name, logits)
    if target is not None:
        a.check_ids(plan.function, "target", target)
        a.check_leading(plan.function, "target", target.shape, name, logits)
        a.check_range(plan.function, plan.vocab_start, plan.vocab_end, name, logits)
    a.check_chunk_size(plan.function, plan.chunk_size)
    a.check_temperature(plan.function, plan.temperature)
    a.checked_backend(plan.function, plan.backend)
    if plan.inplace_gradient:
        a.check_overwritable(plan.function, name, logits)


def forward(ctx: Any, logits: Tensor, target: Tensor | None, plan: Plan) -> tuple[Tensor, ...]:
    """(logprob if there is a target, sum p log p if asked for), each of the logits' leading shape."""
    check(plan, logits, target)
    column = None if target is None else st.local_column(target.reshape(-1), plan.vocab_start, plan.vocab_end)
    parts = st.exchanged(_local_statistics(logits, column, plan), plan.group)
    m_r, rest_r, *further = parts.view(*parts.shape[:2], *logits.shape[:-1]).unbind(1)
    whole = st.merged_normaliser(m_r, rest_r, plan.temperature)
    outputs, depth = [], None
    if column is not None:
        z_t = st.merged_target(further[0])
        column = torch.where(z_t.view(-1) == math.inf, st.NOBODYS, column)
        outputs.append(st.logprob_of(z_t, whole, plan.temperature))
    if plan.with_entropy:
        depth = st.merged_depth(m_r, rest_r, further[-1], whole, plan.temperature)
        outputs.append(depth - whole.log_total)
    ctx.plan = plan
    ctx.set_materialize_grads(False)
    if not plan.inference_only:
        ctx.save_for_backward(logits, *whole, column, depth)
    return tuple(outputs)


def backward(ctx: Any, *cotangents: Tensor | None) -> Tensor:
    """d logits for the cotangents of `forward`'s outputs, in the logits' dtype."""
    plan: Plan = ctx.plan
    if plan.inference_only:
        raise RuntimeError(SPENT)
    logits, largest, log_total, column, depth = ctx.saved_tensors
    logits = logits.detach()  # shares the version counter: autograd sees a gradient written over the logits
    gradient = None if plan.inplace_gradient else logits.new_empty(largest.numel(), logits.shape[-1])
    g_logprob = None if column is None else cotangents[0]
    g_entropy = cotangents[-1] if plan.with_entropy else None
    per_row = [None if x is None else x.reshape(-1) for x in (largest, log_total, column, g_logprob, depth, g_entropy)]
    write = in_backend(write_gradient, a.checked_backend(plan.function, plan.backend))
    for part, block in row_blocks(logits, block_rows(logits, plan.chunk_size)):
        out = block if gradient is None else gradient[part]
        write(out, block, plan.temperature, *(None if x is None else x[part] for x in per_row))
    return logits if gradient is None else gradient.view(logits.shape)


def write_gradient(
    out: Float[Tensor, "n v"],
    block: Float[Tensor, "n v"],
    temperature: float,
    largest: Float[Tensor, " n"],
    log_total: Float[Tensor, " n"],
    column: Int[Tensor, " n"] | None,
    g_logprob: Float[Tensor, " n"] | None,
    depth: Float[Tensor, " n"] | None,
    g_entropy: Float[Tensor, " n"] | None,
) -> None:
    """out = (g_lp (1[v=t] - p) + g_h p (log p - h)) / temperature; out may be the block.

    log p - h is written as (z - m) / temperature - d: a row of equal logits has no slope, to the bit.
    """
    if block.shape[-1] == 0:
        return
    depths = st.below(block, largest.unsqueeze(-1), temperature)
    log_p = depths - log_total.unsqueeze(-1)
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if g_logprob is not None and column is not None:
        gradient = p * -g_logprob.unsqueeze(-1)
        _at_target(gradient, log_p, column, g_logprob)
    if g_entropy is not None and depth is not None:
        slope = p * (st.without_minus_infinity(depths) - depth.unsqueeze(-1))
        gradient += slope * g_entropy.unsqueeze(-1)
    out.copy_(gradient if temperature == 1.0 else gradient / temperature)


def _at_target(
    gradient: Float[Tensor, "n v"], log_p: Float[Tensor, "n v"], column: Int[Tensor, " n"], g: Float[Tensor, " n"]
) -> None:
    """Put g (1 - p) where this rank owns the target, and 0 in the rows that nobody asks for."""
    here = column.clamp_min(0).long().unsqueeze(-1)
    # -expm1(log p), not 1 - p: where p = 1 - tiny the difference is all there is
    others = -torch.expm1(log_p.gather(-1, here)) * g.unsqueeze(-1)
    kept = torch.where((column >= 0).unsqueeze(-1), others, gradient.gather(-1, here))
    gradient.scatter_(-1, here, kept)
    gradient.masked_fill_((column == st.NOBODYS).unsqueeze(-1), 0.0)  # selected, since 0 * NaN is no zero


@functools.cache
def in_backend(f: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A function of row blocks, as it is or compiled: once for each dtype and set of outputs."""
    if backend == "eager":
        return f
    # One row or column is a shape of its own to the compiler, and with all else that is more than its usual 8.
    room = {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    return torch.compile(f, dynamic=True, fullgraph=True, **room)


def _local_statistics(logits: Tensor, column: Tensor | None, plan: Plan) -> Tensor:
    """Statistics of this rank's columns of every row, one row block at a time."""
    n, count = math.prod(logits.shape[:-1]), 2 + (column is not None) + plan.with_entropy
    statistics = torch.empty(count, n, dtype=accumulator(logits.dtype), device=logits.device)
    local = in_backend(st.local_statistics, a.checked_backend(plan.function, plan.backend))
    for part, block in row_blocks(logits, block_rows(logits, plan.chunk_size)):
        block_column = None if column is None else column[part]
        statistics[:, part] = local(block, block_column, plan.temperature, plan.with_entropy)
    return statistics
