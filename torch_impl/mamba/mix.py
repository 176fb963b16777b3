"""What a Mamba2 mixer computes between its projections: convolution, recurrence and gate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.layouts.columns import MambaSizes
from torch_impl.mamba.mamba_ssm_kernels import conv_kernel, convolved
from torch_impl.mamba.scan import chunked_scan


@dataclass(frozen=True)
class SsmParameters:
    """What stands between the projections: whole, or the share of one rank."""

    conv_weight: Float[Tensor, "c k"]
    conv_bias: Float[Tensor, " c"] | None
    dt_bias: Float[Tensor, " h"]
    A_log: Float[Tensor, " h"]
    D: Float[Tensor, "*e"]


def mixed(
    projected: Float[Tensor, "b s w"],
    sizes: MambaSizes,
    parameters: SsmParameters,
    seq_idx: Int[Tensor, "b s"] | None = None,
    *,
    chunk_size: int = 256,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Float[Tensor, "b s i"]:
    """y * silu(z): convolution, recurrence and gate of in_proj's columns z|x|B|C|dt; `seq_idx` as in the scan.

    Cost: no collective; that of `causal_conv` and `chunked_scan`.
    """
    z, convolved, dt = projected.split([sizes.inner, sizes.channels, sizes.num_heads], dim=-1)
    convolved = causal_conv(convolved, parameters.conv_weight, parameters.conv_bias, seq_idx)
    x, B, C = convolved.split([sizes.inner, sizes.shared, sizes.shared], dim=-1)
    y, _ = chunked_scan(
        x.unflatten(-1, (sizes.num_heads, sizes.head_dim)),
        steps(dt, parameters.dt_bias, dt_limit),
        decays(parameters.A_log),
        B.unflatten(-1, (sizes.n_groups, sizes.d_state)),
        C.unflatten(-1, (sizes.n_groups, sizes.d_state)),
        parameters.D,
        chunk_size=chunk_size,
        seq_idx=seq_idx,
    )
    return gated(y.flatten(-2), z)


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


def steps(dt: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float]) -> Tensor:
    """clamp(softplus(dt + dt_bias)), in float32 or wider."""
    wide = accumulator(dt.dtype)
    return F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)


def decays(A_log: Tensor) -> Tensor:
    """A = -exp(A_log), in float32 or wider."""
    return -A_log.to(accumulator(A_log.dtype)).exp()


def gated(y: Tensor, z: Tensor) -> Tensor:
    """y * silu(z)."""
    return (y.to(accumulator(y.dtype)) * F.silu(z.to(accumulator(z.dtype)))).to(y.dtype)
