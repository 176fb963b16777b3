"""Make second derivatives of autograd Functions correct or an error, never silently wrong.

In backward, a linear Function applies its transpose, which is also a Function, so it can be differentiated any number
of times. All other Functions compute their gradient outside autograd from saved tensors and are marked
`first_derivative_only`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

NO_SECOND_DERIVATIVE = (
    "{}: its gradient cannot be differentiated again: backward computes it outside autograd. Compute what is "
    "differentiated twice, such as a gradient penalty, with operations of torch, or detach the gradient"
)


def first_derivative_only(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Make differentiating the result of a backward a RuntimeError.

    torch's `once_differentiable` raises only if a cotangent requires grad. The cotangent of a gradient penalty is
    constant, and the second-order part would be lost without an error, since the gradient also depends on the saved
    tensors.
    """
    function = backward.__qualname__.removesuffix(".backward")

    @wraps(backward)
    def wrapper(ctx: Any, *cotangents: Tensor | None) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *cotangents)
        if not torch.is_grad_enabled():  # the usual case: no create_graph=True
            return gradients
        of_graph = [x for x in cotangents if x is not None and x.requires_grad]
        return tuple(None if gradient is None else _with_error(gradient, of_graph, function) for gradient in gradients)

    return wrapper


def _with_error(gradient: Tensor, cotangents: list[Tensor], function: str) -> Tensor:
    """The gradient behind a node that raises an error.

    The node also depends on the cotangents, since torch.autograd.grad runs only the nodes between outputs and inputs.
    """
    inputs = [gradient.detach().requires_grad_(), *cotangents]
    error = torch._C._functions.DelayedError(NO_SECOND_DERIVATIVE.format(function), len(inputs))  # pyright: ignore[reportAttributeAccessIssue]
    outputs = error(*inputs)
    return outputs[0] if cotangents else outputs
