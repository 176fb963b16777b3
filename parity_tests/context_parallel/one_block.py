"""Attention of one block by CUDA's path, as its schemes call it on a rank, which loads no JAX."""

import torch

from torch_impl.context_parallel.block_kernels import cuda_backward, cuda_forward

SCALE = 0.375
RULES = ("all", "causal", "keys", "pairs")


class OneBlock(torch.autograd.Function):
    """Attention of one block. A query that sees no key has an lse of -inf, which its backward takes as inf."""

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
    """1 where a query sees a key, else 0. The gradient of a query of one key is 0, and so would be its budget."""
    seen = generator.random(shape).argsort(-1) < generator.integers(2, shape[-1] + 1, (*shape[:-1], 1))
    return seen.astype("float64")


def masked(function, q, k, v, seen, rule):
    masks = {"keys": seen[:, None, :1] > 0, "pairs": seen[:, None] > 0}
    return function.apply(q, k, v, masks.get(rule), rule == "causal")
