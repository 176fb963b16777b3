"""Call a user's module on either side, and report its exception or wrong result in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardproof.endings.raised import first_line_of
from shardproof.engines.failure import Raised
from shardproof.engines.ledger import at_users_line, raised_at
from shardproof.judge.reference import ReferenceFailure


def of_torch(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of the PyTorch side. Errors: Raised for its own exception."""
    try:
        return call(*arguments)
    except Exception as error:
        message = f"the PyTorch module raised {_said(error)}{at_users_line(error)}"
        raise Raised(message, rank=0, source=raised_at(error)) from error


def of_flax(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of the flax side. Errors: ReferenceFailure for its own exception."""
    try:
        return call(*arguments)
    except Exception as error:
        raise ReferenceFailure(f"the flax module raised {_said(error)}{at_users_line(error)}") from error


def check_output(out: Any) -> None:
    """Errors: ValueError for anything but a floating tensor with a gradient."""
    if not isinstance(out, torch.Tensor) or not out.is_floating_point():
        raise ValueError(f"Pair: the PyTorch module returns {_kind(out)}; wrap it to return one floating tensor")
    if not out.requires_grad:
        raise ValueError("Pair: the PyTorch module's output has no gradient; give it parameters that require one")
    if not out.numel():
        raise ValueError("Pair: the PyTorch module's output has no element, and nothing could differ")


def check_shape(out: Any, shape: tuple[int, ...]) -> None:
    """Errors: ValueError unless the flax module returns an array with the PyTorch module's shape."""
    if not hasattr(out, "shape"):
        raise ValueError(f"Pair: the flax module returns {_kind(out)}; wrap it to return one array")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(
            f"Pair: the PyTorch module returns {tuple(shape)}, the flax module {tuple(out.shape)}; "
            "make both return the same shape"
        )


def _kind(x: Any) -> str:
    return f"a {type(x).__name__}" + (f" of {x.dtype}" if isinstance(x, torch.Tensor) else "")


def _said(error: BaseException) -> str:
    """Type and first line; JAX's messages go on with advice."""
    return f"{type(error).__name__}: {first_line_of(error)}"
