"""A function that is wrong if its forward runs twice for one backward."""

import torch
import torch.distributed as dist

CALLS = {}  # per rank of the world


def of_one_forward_for_each_backward(mesh, a, b):
    """Right in the first of two forwards with gradients, as if a backward came between them."""
    CALLS[dist.get_rank()] = CALLS.get(dist.get_rank(), 0) + torch.is_grad_enabled()
    return OfItsCall.apply(a, CALLS[dist.get_rank()]), 2 * b


class OfItsCall(torch.autograd.Function):
    """Saves the first call's factor, and another one afterwards."""

    @staticmethod
    def forward(ctx, a, number):
        ctx.save_for_backward(torch.tensor(float(min(number, 2))))
        return 2 * a

    @staticmethod
    def backward(ctx, of_a):
        (number,) = ctx.saved_tensors
        return 2 * number * of_a, None
