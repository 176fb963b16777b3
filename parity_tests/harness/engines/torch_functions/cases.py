"""The public functions of torch.distributed, each with a small call that runs on lockstep and on gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Body = Callable[..., Any]  # (mesh, the function of torch) -> a value to compare, or (mesh) -> that
MESH = {"dp": 2, "tp": 2}
SIZE = 4

CASES: dict[str, Callable[[Any], Any]] = {}  # by the name of the function or of the body
RUN: dict[str, str] = {}  # a function's full name: its case's name


def runs(owner: Any, *names: str) -> Callable[[Body], Body]:
    """Declare a case for each of these functions of a module or class; the body calls any of them in the same way.

    A function that this torch lacks has no case.
    """

    def register(body: Body) -> Body:
        for name in filter(partial(hasattr, owner), names):
            CASES[full_name(owner, name)] = partial(_with, body, owner, name)
        RUN.update({full_name(owner, name): full_name(owner, name) for name in names})
        return body

    return register


def _with(body: Body, owner: Any, name: str, mesh: Any) -> Any:
    return body(mesh, getattr(owner, name))


def together(owner: Any, *names: str) -> Callable[[Body], Body]:
    """Declare one case for all of these functions; its body calls each function that this torch has."""

    def register(body: Body) -> Body:
        case = f"{body.__module__.rpartition('.')[2]}.{body.__name__}"
        if any(hasattr(owner, name) for name in names):
            CASES[case] = body
        RUN.update({full_name(owner, name): case for name in names})
        return body

    return register


def full_name(owner: Any, name: str) -> str:
    path = owner.__qualname__ if isinstance(owner, type) else owner.__name__.removeprefix("torch.distributed.")
    return f"{path.removeprefix('_').removeprefix('torch.')}.{name}"


def plain(value: Any) -> Any:
    """Tensors as dtype, shape and list, so that equality means bits and kinds."""
    if isinstance(value, Tensor):
        full: Any = getattr(value, "full_tensor", lambda: value)()
        return str(full.dtype), tuple(full.shape), full.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def numbers(*shape: int, rank: int | None = None) -> Tensor:
    """Small integers, so that sums are exact; they differ from rank to rank."""
    rank = dist.get_rank() if rank is None else rank
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + rank).float()
