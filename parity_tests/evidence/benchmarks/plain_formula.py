"""The log-probability of sharded logits as one would first write it in plain torch, to compare ours with.

log p = (z - m) - log sum exp(z - m) of all columns of a rank at once, in float32. The maximum, the sum and the target's
log-probability are each an all_reduce; the softmax is saved for the gradient g (1[v=t] - p).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp


class PlainFormula(torch.autograd.Function):
    """For logits [b, s, v] whose first column is id `start`; `saves` says whether a gradient follows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup, start: int, saves: bool) -> Tensor:
        wide = logits.float()
        row_max = wide.amax(-1, keepdim=True)
        dist.all_reduce(row_max, op=ReduceOp.MAX, group=group)
        shifted = wide - row_max
        row_sum = shifted.exp().sum(-1, keepdim=True)
        dist.all_reduce(row_sum, group=group)
        log_p = shifted - row_sum.log()
        is_elsewhere = (target < start) | (target >= start + logits.shape[-1])
        column = (target - start).masked_fill(is_elsewhere, 0).unsqueeze(-1)
        score = log_p.gather(-1, column).squeeze(-1).masked_fill(is_elsewhere, 0.0)
        dist.all_reduce(score, group=group)
        if saves:
            ctx.save_for_backward(log_p.exp(), column, is_elsewhere)
            ctx.dtype = logits.dtype
        return score

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        p, column, is_elsewhere = ctx.saved_tensors
        gradient = -p
        gradient.scatter_add_(-1, column, (~is_elsewhere).to(p.dtype).unsqueeze(-1))
        return gradient.mul_(cotangents[0].unsqueeze(-1)).to(ctx.dtype), None, None, None, None
