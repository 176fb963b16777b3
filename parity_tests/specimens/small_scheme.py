"""A scheme of one or two lines, with a sum over ranks to break, for tests of checks other than values."""

import torch
import torch.distributed as dist

from shardproof import scheme, values


def summed(x, group):
    """The sum over a group, whose backward is the identity."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            total = x.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent

    return Sum.apply(x)


def declared(function, reference=lambda x: x * 2.0, inputs=None, outputs="b/tp", **more):
    return scheme(
        **{
            "reference": reference, "mesh": {"tp": (2, 4)}, "inputs": inputs or {"x": "b/tp"}, "outputs": outputs,
            "draw": {"x": values("normal")}, "dtypes": ("float32",), **more,
        }
    )(function)  # fmt: skip
