"""Use mamba-ssm's scan and causal-conv1d's convolution if these packages import and support the CUDA tensors.

Both compute in float32. The eager functions take wider tensors, and sizes without a kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (2, 3, 4)  # taps that causal-conv1d's kernel supports; it also needs a multiple of 8 channels


def scan_kernel(x: Tensor, B: Tensor, C: Tensor) -> Callable[..., Any] | None:
    """mamba-ssm's function for these tensors, or None."""
    if not (x.is_cuda and x.numel() and x.dtype in DTYPES and x.dtype == B.dtype == C.dtype):
        return None
    return import_function("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")


def conv_kernel(x: Tensor, weight: Tensor) -> Callable[..., Any] | None:
    """causal-conv1d's function for these tensors, or None."""
    if not (x.is_cuda and x.numel() and x.dtype in DTYPES and weight.dtype in DTYPES):
        return None
    if weight.shape[1] not in WIDTHS or x.shape[-1] % 8:
        return None
    return import_function("causal_conv1d", "causal_conv1d", "causal_conv1d_fn")


@cache
def import_function(package: str, module: str, name: str) -> Callable[..., Any] | None:
    """A function of an optional package, or None; warns once if the package is installed but does not import."""
    # A missing package is the usual case and needs no warning; a broken one does.
    if find_spec(package) is None:
        return None
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        warnings.warn(f"mamba: {package} is installed and does not import ({error}); not used", stacklevel=2)
        return None


def kernel_scan(
    kernel: Callable[..., Any],
    x: Float[Tensor, "b s h p"],
    dt: Float[Tensor, "b s h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b s g n"],
    C: Float[Tensor, "b s g n"],
    D: Float[Tensor, "*e"] | None,
    chunk_size: int,
    seq_idx: Int[Tensor, "b s"] | None,
    initial_states: Float[Tensor, "b h p n"] | None,
) -> tuple[Float[Tensor, "b s h p"], Float[Tensor, "b h p n"]]:
    """`chunked_scan` of the same arguments, by `kernel`."""
    # The kernel's options for dt (bias, softplus, limits) stay off: `steps` has applied them.
    return kernel(
        x.contiguous(),
        dt.contiguous(),
        A.float(),
        B.contiguous(),
        C.contiguous(),
        chunk_size,
        D=None if D is None else _of_heads(D, len(A)),
        seq_idx=None if seq_idx is None else (seq_idx - seq_idx[:, :1]).int(),  # initial_states belong to sequence 0
        initial_states=initial_states,
        return_final_states=True,
    )


def _of_heads(D: Float[Tensor, "*e"], heads: int) -> Tensor:
    """D as [h], or [h, p] with a number per channel: the two shapes that the kernel supports."""
    rows = D.reshape(heads, -1)
    return rows[:, 0] if rows.shape[1] == 1 else rows


def kernel_conv(
    kernel: Callable[..., Any],
    x: Float[Tensor, "b s c"],
    weight: Float[Tensor, "c k"],
    bias: Float[Tensor, " c"] | None,
    seq_idx: Int[Tensor, "b s"] | None,
) -> Float[Tensor, "b s c"]:
    """`causal_conv` of the same arguments, by `kernel`."""
    # For packed sequences the kernel requires channels last in memory, and not a slice of a larger tensor.
    channels = x.flatten().view(x.shape).transpose(1, 2)
    index = None if seq_idx is None else seq_idx.int().contiguous()
    bias = None if bias is None else bias.to(weight.dtype)
    return kernel(channels, weight.contiguous(), bias, seq_idx=index, activation="silu").transpose(1, 2)
