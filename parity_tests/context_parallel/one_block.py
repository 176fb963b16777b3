"""Attention of one block on CUDA's path, for schemes. Ranks import this, so it loads no JAX."""

import torch

from torch_impl.context_parallel.block_kernels import cuda_backward, cuda_forward

SCALE = 0.375
RULES = ("all", "causal", "keys", "pairs")


class OneBlock(torch.autograd.Function):
    """Attention of one block. Forward gives lse = -inf to a query that sees no key; backward needs +inf there."""

    @staticmethod
    def forward(ctx, q, k, v, seen, is_causal):
        out, lse = cuda_forward(q, k, v, seen, is_causal, SCALE)
        ctx.save_for_backward(q, k, v, out, lse.masked_fill(lse == -torch.inf, torch.inf))
        ctx.rules = seen, is_causal
        return out

    @staticmethod
    def backward(ctx, cotangent):
        return *cuda_backward(cotangent, *ctx.saved_tensors, *ctx.rules, SCALE), None, None


def two_keys_or_more(generator, shape):
    """1 where a query sees a key, else 0. With only one key, a query's gradient and its budget would be 0."""
    seen = generator.random(shape).argsort(-1) < generator.integers(2, shape[-1] + 1, (*shape[:-1], 1))
    return seen.astype("float64")


def masked(function, q, k, v, seen, rule):
    masks = {"keys": seen[:, None, :1] > 0, "pairs": seen[:, None] > 0}
    return function.apply(q, k, v, masks.get(rule), rule == "causal")
