"""Schemes of one or two lines, and a sum over ranks, for tests that break something other than values."""

import torch
import torch.distributed as dist

from shardproof import scheme, values


def summed(x, group):
    """The sum over a group, whose backward is the identity."""
    return Sum.apply(x, group)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, cotangent):
        return Copy.apply(cotangent, ctx.group), None


class Copy(torch.autograd.Function):
    """The backward of `Sum`: the identity, since every rank has the same cotangent of a sum. Its own backward sums."""

    @staticmethod
    def forward(ctx, cotangent, group):
        ctx.group = group
        return cotangent.view_as(cotangent)

    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient, ctx.group), None


def declared(function, reference=lambda x: x * 2.0, inputs=None, outputs="b/tp", **more):
    return scheme(
        **{
            "reference": reference, "mesh": {"tp": (2, 4)}, "inputs": inputs or {"x": "b/tp"}, "outputs": outputs,
            "draw": {"x": values("normal")}, "dtypes": ("float32",), **more,
        }
    )(function)  # fmt: skip
