"""Causal depthwise convolution along the sequence, which starts anew with each sequence of a stream.

causal-conv1d's kernel computes it where `outside_kernels` finds it.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.mamba.outside_kernels import conv_kernel, convolved


def causal_conv(
    x: Float[Tensor, "b s c"],
    weight: Float[Tensor, "c k"],
    bias: Float[Tensor, " c"] | None = None,
    seq_idx: Int[Tensor, "b s"] | None = None,
) -> Float[Tensor, "b s c"]:
    """silu(bias + sum over j < k of weight[:, k - 1 - j] * x[t - j]), of those t - j in t's own sequence.

        x  "b s c"     weight  "c k"     seq_idx  "b s"     ->   "b s c"

    `seq_idx` names the sequence of each token; without it each row is one sequence.

    Cost:   no collective. Eager: one copy of x for each of the k taps, in float32 or wider, which is also what is
            saved; the kernel saves x.
    Errors: ValueError if weight, bias or seq_idx does not fit x.
    """
    _check(x, weight, bias, seq_idx)
    if not x.shape[1]:
        return x
    if kernel := conv_kernel(x, weight):
        return convolved(kernel, x, weight, bias, seq_idx)
    wide, k = accumulator(x.dtype), weight.shape[1]
    taps = F.pad(x.to(wide), (0, 0, k - 1, 0)).unfold(1, k, 1)  # [b s c k], the last is the token itself
    if seq_idx is not None:
        before = F.pad(seq_idx, (k - 1, 0), value=-1).unfold(1, k, 1)
        taps = taps.masked_fill((before != seq_idx[..., None])[:, :, None], 0.0)
    total = (taps * weight.to(wide)).sum(-1)
    return F.silu(total if bias is None else total + bias.to(wide)).to(x.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> None:
    function, channels = "mamba.causal_conv", x.shape[-1]
    if x.ndim != 3 or weight.ndim != 2 or len(weight) != channels:
        raise ValueError(
            f"{function}: x is {list(x.shape)}, weight is {list(weight.shape)}; they are [b, s, c], [c, k]"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{function}: bias is {list(bias.shape)}; x has {channels} channels")
    if seq_idx is not None and seq_idx.shape != x.shape[:2]:
        raise ValueError(f"{function}: seq_idx is {list(seq_idx.shape)}; x has {list(x.shape[:2])} tokens")
