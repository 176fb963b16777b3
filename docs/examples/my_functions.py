"""Another vocab_parallel_logprob, on plain torch.distributed: the built-in schemes find it by its name and judge it."""

import torch
import torch.distributed as dist


class Logprob(torch.autograd.Function):
    """log p[t] = -log1p(rest) if y_t is the largest logit, else y_t - m - log(total): no digit is lost near p = 1."""

    @staticmethod
    def forward(ctx, logits, target, start, group, temperature):
        rows = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        largest = torch.nn.functional.pad(rows, (0, 1), value=-torch.inf).amax(-1)  # a shard may have no columns
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        is_target = torch.arange(rows.shape[-1], device=rows.device) + start == target[..., None]
        below = rows - largest[..., None]
        exponentials = below.exp()
        rest = torch.where(is_target, 0.0, exponentials).sum(-1)
        at_target = torch.where(is_target, below, 0.0).sum(-1)
        terms = torch.stack([rest, at_target, is_target.sum(-1).to(rows.dtype)])
        dist.all_reduce(terms, group=group)
        rest, at_target, found = terms
        total = rest + at_target.exp()
        ctx.save_for_backward(exponentials / total[..., None], rest / total, is_target, found)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        logprob = torch.where(at_target == 0.0, -rest.log1p(), at_target - total.log())
        return torch.where(found > 0, logprob, 0.0)

    @staticmethod
    def backward(ctx, gradient):
        probabilities, others, is_target, found = ctx.saved_tensors
        slope = torch.where(is_target, others[..., None], -probabilities)
        slope = torch.where((found > 0)[..., None], slope * gradient[..., None], 0.0)
        return (slope / ctx.temperature).to(ctx.dtype), None, None, None, None


def vocab_parallel_logprob(logits, target, tp_group, *, vocab_start_index, vocab_end_index, temperature=1.0):
    return Logprob.apply(logits, target, vocab_start_index, tp_group, temperature)
