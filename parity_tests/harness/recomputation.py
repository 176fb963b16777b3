"""A function that is wrong if its forward runs twice for one backward."""

import torch

CALLS = {}  # per rank


def of_one_forward_for_each_backward(mesh, a, b):
    """Right in the first of two forwards with gradients, as if a backward came between them."""
    CALLS[mesh.rank("tp")] = CALLS.get(mesh.rank("tp"), 0) + torch.is_grad_enabled()
    return OfItsCall.apply(a, CALLS[mesh.rank("tp")]), 2 * b


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
