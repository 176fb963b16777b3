"""Choose an implementation: eager torch, compiled torch, or a Triton kernel.

An explicit argument decides; "auto" follows the device: Triton on CUDA, eager elsewhere. No environment variable
is read. A missing backend is an error; there is no silent fallback.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_impl.contract import Rejected

BACKENDS = ("auto", "eager", "compile", "triton")


def checked_backend(backend: str, name: str, x: Tensor) -> str:
    """The implementation that `backend` selects for the tensor x: 'eager', 'compile' or 'triton'.

    Error messages use `name`, the name of x.

    Errors: ValueError for an unknown name, or for Triton with a tensor that is not on CUDA; ImportError without Triton.
    """
    if backend not in BACKENDS:
        raise Rejected(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    # Messages name the backend that the caller passed, even if "auto" resolves to Triton.
    request = f"backend={backend!r}"
    if backend == "auto":
        request += " on CUDA"
        backend = "triton" if x.is_cuda else "eager"
    if backend == "triton":
        _check_triton(request, name, x.device)
    return backend


def _check_triton(request: str, name: str, device: torch.device) -> None:
    try:
        import triton  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise Rejected(
            f"{request} needs triton; pip install -e '.[triton]' in the clone, or use 'eager' or 'compile'", ImportError
        ) from None
    # Imported after the check above, since a kernel's module imports Triton.
    from torch_impl.kernels.softmax import _statistics

    # Triton chooses its interpreter when a kernel is declared. An interpreted kernel is not a JITFunction.
    if device.type != "cuda" and isinstance(_statistics, triton.JITFunction):
        raise Rejected(
            f"backend='triton' runs on CUDA but {name} is on {device.type}; use 'auto', 'eager' or "
            "'compile', or set TRITON_INTERPRET=1 before triton is first imported"
        )


@functools.cache
def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """Compile f, a function of row blocks. torch.compile recompiles it for each dtype and set of outputs."""
    # The compiler also specializes on one row and on one column; all variants together exceed its default limit of 8.
    limit: dict[str, Any] = (
        {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    )
    return torch.compile(f, dynamic=True, fullgraph=True, **limit)
