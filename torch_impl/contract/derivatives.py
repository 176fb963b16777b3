"""Make a second derivative of an autograd Function right or an error, never silently left out.

Linear Functions call, in backward, the Function that is their transpose, and so can be differentiated any number of
times. The others compute their gradient outside autograd from saved tensors and are marked `first_derivative_only`.
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
    """A backward whose result raises a RuntimeError when it is differentiated.

    torch's `once_differentiable` raises where a cotangent requires grad. A gradient penalty has a constant cotangent,
    and there it would lose the second-order part without an error, since the gradient also depends on the saved
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
    """The gradient, behind a node that raises. It hangs on the cotangents too: torch.autograd.grad runs only the nodes
    between its outputs and its inputs."""
    inputs = [gradient.detach().requires_grad_(), *cotangents]
    error = torch._C._functions.DelayedError(NO_SECOND_DERIVATIVE.format(function), len(inputs))  # pyright: ignore[reportAttributeAccessIssue]
    outputs = error(*inputs)
    return outputs[0] if cotangents else outputs
