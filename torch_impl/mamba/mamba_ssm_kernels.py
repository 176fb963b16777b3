"""Use mamba-ssm's scan and causal-conv1d's convolution, where these packages import and support the CUDA tensors.

Both compute in float32: wider tensors, and sizes that they have no kernel for, are left to the eager functions.
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
WIDTHS = (2, 3, 4)  # of causal-conv1d's kernel, which also wants channels in eights


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
    """A function of an optional package, or None; one warning if the package is installed and does not import."""
    # Not installed is the usual case and no reason to warn; installed and broken is.
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
    """`chunked_scan` by `kernel`, of the same arguments."""
    # The kernel's options for the bias, softplus and limits of dt stay off: `steps` has applied them.
    return kernel(
        x.contiguous(),
        dt.contiguous(),
        A.float(),
        B.contiguous(),
        C.contiguous(),
        chunk_size,
        D=None if D is None else _of_heads(D, len(A)),
        seq_idx=None if seq_idx is None else (seq_idx - seq_idx[:, :1]).int(),  # the initial state is sequence 0's
        initial_states=initial_states,
        return_final_states=True,
    )


def _of_heads(D: Float[Tensor, "*e"], heads: int) -> Tensor:
    """[h], or [h, p] where each channel has its number: the two shapes that the kernel supports."""
    rows = D.reshape(heads, -1)
    return rows[:, 0] if rows.shape[1] == 1 else rows


def kernel_conv(
    kernel: Callable[..., Any],
    x: Float[Tensor, "b s c"],
    weight: Float[Tensor, "c k"],
    bias: Float[Tensor, " c"] | None,
    seq_idx: Int[Tensor, "b s"] | None,
) -> Float[Tensor, "b s c"]:
    """`causal_conv` by `kernel`, of the same arguments."""
    # The kernel requires channels last in memory for packed sequences, and no stride of a larger tensor.
    channels = x.flatten().view(x.shape).transpose(1, 2)
    index = None if seq_idx is None else seq_idx.int().contiguous()
    bias = None if bias is None else bias.to(weight.dtype)
    return kernel(channels, weight.contiguous(), bias, seq_idx=index, activation="silu").transpose(1, 2)
