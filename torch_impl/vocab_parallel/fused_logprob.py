"""What the cotangents of looked-up ids ask of a row's gradient, slot by slot.

A row looks up k ids, of which this rank owns some and two may be equal. At the column of an id the gradient is
own (1 - p) - p others, elsewhere -p total: own, others and total are sums of cotangents, each a sum of its own and no
difference of two, since p may be all but 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl import kernels
from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel import arguments as a
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.statistics import NOBODYS, block_rows, row_blocks

SPENT = "inference_only=True saved nothing for backward; call with inference_only=False"


class Asked(NamedTuple):
    """Slots in any order; one that this rank does not own repeats one that it does, if there is any."""

    column: Int[Tensor, "n k"]
    own: Float[Tensor, "n k"]
    others: Float[Tensor, "n k"] | None  # None where k is 1
    total: Float[Tensor, " n"]

    def rows(self, part: slice) -> Asked:
        """Some of the rows."""
        others = None if self.others is None else self.others[part]
        return Asked(self.column[part], self.own[part], others, self.total[part])


def asked_of(column: Int[Tensor, "n k"], g: Float[Tensor, "n k"]) -> Asked:
    """The sums of cotangents g of k >= 1 columns; an id that nobody owns asks nothing."""
    g = torch.where(column == NOBODYS, 0.0, g)
    if column.shape[-1] == 1:
        return Asked(column, g, None, g.squeeze(-1))
    column = column.contiguous()
    in_order, order = column.sort(-1)
    first = torch.searchsorted(in_order, column)
    past = torch.searchsorted(in_order, column, right=True)
    sorted_g = g.gather(-1, order)
    before = F.pad(sorted_g.cumsum(-1), (1, 0)).gather(-1, first)
    after = F.pad(sorted_g.flip(-1).cumsum(-1).flip(-1), (0, 1)).gather(-1, past)
    own = torch.zeros_like(g).scatter_add_(-1, first, g).gather(-1, first)
    # All slots are written to the gradient at once: one of another rank must not undo what this rank's writes.
    slot = torch.arange(column.shape[-1], device=column.device)
    source = torch.where(column >= 0, slot, order[:, -1:])
    return Asked(column.gather(-1, source), own.gather(-1, source), (before + after).gather(-1, source), g.sum(-1))


@dataclass(frozen=True)
class Plan:
    """Everything but the tensors. `function` and `group_name` are what an error calls things.

    `several` ids of each row are looked up, not one. They come as logits where they are not `normalised`.
    """

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
    several: bool = False
    normalised: bool = True

    @property
    def ids_name(self) -> str:
        return "global_indices" if self.several else "target"


def check(plan: Plan, logits: Tensor, target: Tensor | None) -> None:
    """Refuse what cannot be, before any collective."""
    name = "vocab_parallel_logits"
    if not plan.whole_rows:
        a.checked_tp_group(plan.function, plan.group_name, plan.group)
    a.check_logits(plan.function, name, logits)
    if target is not None:
        a.check_ids(plan.function, plan.ids_name, target)
        a.check_leading(plan.function, plan.ids_name, target.shape, name, logits, plan.several)
        a.check_range(plan.function, plan.vocab_start, plan.vocab_end, name, logits)
    a.check_chunk_size(plan.function, plan.chunk_size)
    a.check_temperature(plan.function, plan.temperature)
    _backend(plan, logits)
    if plan.inplace_gradient:
        a.check_overwritable(plan.function, name, logits)


def forward(ctx: Any, logits: Tensor, target: Tensor | None, plan: Plan) -> tuple[Tensor, ...]:
    """(logprob of the target's shape if there is one, sum p log p of the logits' leading shape if asked for)."""
    check(plan, logits, target)
    column = None if target is None else _columns(target, logits, plan)
    parts = st.exchanged(statistics_of(logits, column, plan), plan.group)
    m_r, rest_r, *further = parts.view(*parts.shape[:2], *logits.shape[:-1]).unbind(1)
    whole = st.merged_normaliser(m_r, rest_r, plan.temperature)
    outputs, depth = [], None
    if target is not None and column is not None:
        z_t = st.merged_target(parts[:, 2 : 2 + column.shape[-1]]).mT
        column = torch.where(z_t == math.inf, st.NOBODYS, column)
        outputs.append(_looked_up(z_t.reshape(target.shape), whole, plan))
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
    asked = None
    if g_logprob is not None and column is not None and column.numel():
        asked = asked_of(column, g_logprob.reshape(column.shape))
    per_row = [None if x is None else x.reshape(-1) for x in (largest, log_total, depth, g_entropy)]
    write = chosen(write_gradient, plan, logits)
    for part, block in row_blocks(logits, rows_at_once(plan, logits)):
        out = block if gradient is None else gradient[part]
        rows = (None if x is None else x[part] for x in per_row)
        write(out, block, plan.temperature, plan.normalised, None if asked is None else asked.rows(part), *rows)
    return logits if gradient is None else gradient.view(logits.shape)


def write_gradient(
    out: Float[Tensor, "n v"],
    block: Float[Tensor, "n v"],
    temperature: float,
    normalised: bool,
    asked: Asked | None,
    largest: Float[Tensor, " n"],
    log_total: Float[Tensor, " n"],
    depth: Float[Tensor, " n"] | None,
    g_entropy: Float[Tensor, " n"] | None,
) -> None:
    """out = (sum_t g_t (1[v=t] - p) + g_h p (log p - h)) / temperature; out may be the block.

    Looked-up logits that are not normalised have no `- p`. log p - h is written as (z - m) / temperature - d: a
    row of equal logits has no slope, to the bit.
    """
    if block.shape[-1] == 0:
        return
    depths = st.below(block, largest.unsqueeze(-1), temperature)
    log_p = (depths if g_entropy is None else depths.clone()).sub_(log_total.unsqueeze(-1))
    term = None if asked is None else _terms_at_ids(log_p, asked, normalised)
    p = log_p.exp_()
    slope = None
    if g_entropy is not None and depth is not None:
        slope = st.without_minus_infinity(depths).sub_(depth.unsqueeze(-1)).mul_(p)
    gradient = p.zero_() if asked is None or not normalised else p.mul_(-asked.total.unsqueeze(-1))
    if asked is not None and term is not None:
        _put_at_ids(gradient, term, asked)
    if slope is not None and g_entropy is not None:
        g = g_entropy.unsqueeze(-1)
        # Selected too: an entropy that nobody uses, as at a dropped position, has no slope, be its row NaN.
        gradient.addcmul_(without_rows(slope, g == 0), g)
    out.copy_(gradient if temperature == 1.0 else gradient.div_(temperature))


def _terms_at_ids(log_p: Float[Tensor, "n v"], asked: Asked, normalised: bool) -> Float[Tensor, "n k"]:
    """own (1 - p) - p others at each id."""
    term = asked.own
    if normalised:
        log_p_here = log_p.gather(-1, asked.column.clamp_min(0).long())
        # -expm1(log p), not 1 - p: where p = 1 - tiny the difference is all there is
        term = -torch.expm1(log_p_here) * asked.own
        if asked.others is not None:
            term = term - log_p_here.exp() * asked.others
    return term


def _put_at_ids(gradient: Float[Tensor, "n v"], term: Float[Tensor, "n k"], asked: Asked) -> None:
    """Put the terms at the ids that this rank owns, and 0 in the rows of which nobody's are asked."""
    here = asked.column.clamp_min(0).long()
    kept = torch.where(asked.column >= 0, term, gradient.gather(-1, here))
    gradient.scatter_(-1, here, kept)
    nobodys = (asked.column == st.NOBODYS).all(-1, keepdim=True)
    without_rows(gradient, nobodys)  # selected, since 0 * NaN is no zero


def without_rows(x: Float[Tensor, "n v"], rows: Bool[Tensor, "n 1"]) -> Float[Tensor, "n v"]:
    """Zeros in some rows, whatever is there, in place: on the bits, since masked_fill_ takes long on a CPU."""
    bits = x.view(torch.int32 if x.itemsize == 4 else torch.int64)
    bits.bitwise_and_(rows.to(bits.dtype) - 1)
    return x


def _columns(ids: Tensor, logits: Tensor, plan: Plan) -> Int[Tensor, "n k"]:
    """This rank's column of each id; a target is a row's only one."""
    of_rows = ids.reshape(logits.shape[:-1].numel(), ids.shape[-1] if plan.several else 1)
    return st.local_column(of_rows, plan.vocab_start, plan.vocab_end)


def _looked_up(z_t: Float[Tensor, "*b"], whole: st.Normaliser, plan: Plan) -> Float[Tensor, "*b"]:
    """Log-probabilities of the looked-up logits, or those themselves; 0 where nobody owns the id."""
    of_row = st.Normaliser(*(x.unsqueeze(-1) for x in whole)) if plan.several else whole
    return st.logprob_of(z_t, of_row, plan.temperature) if plan.normalised else st.owned_or_nothing(z_t, z_t, of_row)


def chosen(f: Callable[..., Any], plan: Plan, logits: Tensor) -> Callable[..., Any]:
    """A function of row blocks as the plan and the logits' device want it: every composition of the core asks here."""
    return in_backend(f, _backend(plan, logits))


def rows_at_once(plan: Plan, logits: Tensor) -> int:
    """Rows of one block; a kernel has no working set to bound and takes them all."""
    if _backend(plan, logits) == "triton":
        return max(1, math.prod(logits.shape[:-1]))
    return block_rows(logits, plan.chunk_size)


def statistics_of(logits: Tensor, column: Tensor | None, plan: Plan) -> Float[Tensor, "f n"]:
    """Statistics of this rank's columns of every row, one row block at a time."""
    n, looked_up = math.prod(logits.shape[:-1]), 0 if column is None else column.shape[-1]
    count = 2 + looked_up + plan.with_entropy
    statistics = torch.empty(count, n, dtype=accumulator(logits.dtype), device=logits.device)
    local = chosen(st.local_statistics, plan, logits)
    for part, block in row_blocks(logits, rows_at_once(plan, logits)):
        block_column = None if column is None else column[part]
        statistics[:, part] = local(block, block_column, plan.temperature, plan.with_entropy)
    return statistics


def in_backend(f: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A function of row blocks, as it is or compiled, or its Triton kernel."""
    if backend != "triton":
        return f if backend == "eager" else kernels.compiled(f)
    from torch_impl.kernels import softmax  # here: only they need triton

    return {
        st.local_statistics: softmax.local_statistics,
        write_gradient: softmax.write_gradient,
    }[f]


def _backend(plan: Plan, logits: Tensor) -> str:
    return kernels.checked_backend(plan.function, plan.backend, "vocab_parallel_logits", logits)
