"""Which implementation computes: torch as it is, torch compiled, or a Triton kernel.

An explicit argument says so; "auto" leaves it to the device: Triton on CUDA, eager elsewhere. No environment variable
is read, and a backend that is missing is an error, never a silent fall back to another.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "eager", "compile", "triton")


def checked_backend(function: str, backend: str, name: str, x: Tensor) -> str:
    """What `backend` comes to for a tensor x on its device: 'eager', 'compile' or 'triton'.

    `function` and `name`, that of x, are for messages.

    Errors: ValueError for another name, or Triton for a tensor that is not on CUDA; ImportError without Triton.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{function}: backend={backend!r} is not one of {', '.join(BACKENDS)}")
    asked = f"backend={backend!r}"
    if backend == "auto":
        asked += " on CUDA"
        backend = "triton" if x.is_cuda else "eager"
    if backend == "triton":
        _check_triton(function, asked, name, x.device)
    return backend


def _check_triton(function: str, asked: str, name: str, device: torch.device) -> None:
    try:
        import triton  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            f"{function}: {asked} needs triton; pip install 'shardproof[triton]', or use 'eager' or 'compile'"
        ) from None
    from torch_impl.kernels.row_gather import gather_kernel

    # Triton decides when a kernel is declared: only its interpreter makes something that is no JITFunction.
    if device.type != "cuda" and isinstance(gather_kernel, triton.JITFunction):
        raise ValueError(
            f"{function}: backend='triton' runs on CUDA but {name} is on {device.type}; use 'auto', 'eager' or "
            "'compile', or set TRITON_INTERPRET=1 before triton is first imported"
        )


@functools.cache
def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` of f, a function of row blocks: once for each dtype and set of outputs."""
    # One row or column is a shape of its own to the compiler, and with all else that is more than its usual 8.
    room: dict[str, Any] = (
        {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    )
    return torch.compile(f, dynamic=True, fullgraph=True, **room)
