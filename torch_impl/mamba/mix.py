"""The computation of a Mamba2 mixer between its projections: convolution, recurrence and gate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import index

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.contract import Rejected, Sharded, ShardedInt, contract
from torch_impl.layouts.columns import MambaSizes
from torch_impl.layouts.divisibility import check_offset_tensor
from torch_impl.mamba.mamba_ssm_kernels import conv_kernel, kernel_conv
from torch_impl.mamba.scan import scan


@dataclass(frozen=True)
class SsmParameters:
    """The parameters of a mixer between its projections, unsharded or one rank's shard."""

    conv_weight: Float[Tensor, "c k"]
    conv_bias: Float[Tensor, " c"] | None
    dt_bias: Float[Tensor, " h"]
    A_log: Float[Tensor, " h"]
    D: Float[Tensor, "*e"]


def mix_columns(
    projected: Float[Tensor, "b s w"],
    sizes: MambaSizes,
    parameters: SsmParameters,
    seq_idx: Int[Tensor, "b s"] | None = None,
    *,
    chunk_size: int = 256,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Float[Tensor, "b s i"]:
    """Convolution, recurrence and gate of in_proj's columns z|x|B|C|dt; `seq_idx` as in `chunked_scan`.

    Cost: no collective; `causal_conv` and `chunked_scan`.
    """
    # 1. The convolution of x|B|C together.
    z, xBC, dt = projected.split([sizes.inner, sizes.channels, sizes.num_heads], dim=-1)
    xBC = convolution(xBC, parameters.conv_weight, parameters.conv_bias, seq_idx)
    x, B, C = xBC.split([sizes.inner, sizes.shared, sizes.shared], dim=-1)
    # 2. The recurrence, head by head.
    y, _ = scan(
        x.unflatten(-1, (sizes.num_heads, sizes.head_dim)),
        steps(dt, parameters.dt_bias, dt_limit),
        decays(parameters.A_log),
        B.unflatten(-1, (sizes.n_groups, sizes.d_state)),
        C.unflatten(-1, (sizes.n_groups, sizes.d_state)),
        parameters.D,
        chunk_size,
        seq_idx,
    )
    # 3. The gate.
    return gate(y.flatten(-2), z)


@contract
def causal_conv(
    x: Sharded[Tensor, "b s c"],
    weight: Sharded[Tensor, "c k"],
    bias: Sharded[Tensor, "c"] | None = None,
    seq_idx: ShardedInt[Tensor, "b s"] | None = None,
) -> Sharded[Tensor, "b s c"]:
    """Causal depthwise convolution and silu along each sequence.

    silu(bias + sum over j < k of weight[:, k - 1 - j] * x[t - j]), over positions t - j in the same sequence as t.
    `seq_idx` has the sequence index of each token; without it each row is one sequence. Uses causal-conv1d's kernel if
    `mamba_ssm_kernels` finds it.

    Cost:   no collective. The eager code copies x for each of the k taps, in float32 or wider, and saves these copies;
            the kernel saves x.
    Errors: ValueError if weight, bias or seq_idx does not fit x; TypeError for an unsupported dtype.
    """
    return convolution(x, weight, bias, seq_idx)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> Float[Tensor, "b s c"]:
    """`causal_conv` for validated arguments."""
    # Without tokens, `unfold` would fail: there are fewer padded rows than taps.
    if not x.shape[1]:
        return x
    if kernel := conv_kernel(x, weight):
        return kernel_conv(kernel, x, weight, bias, seq_idx)
    wide, k = accumulator(x.dtype), weight.shape[1]
    taps = F.pad(x.to(wide), (0, 0, k - 1, 0)).unfold(1, k, 1)  # [b s c k], the last tap is the token itself
    # A tap in another sequence reads zero, like a tap before the first token.
    if seq_idx is not None:
        before = F.pad(seq_idx, (k - 1, 0), value=-1).unfold(1, k, 1)
        taps = taps.masked_fill((before != seq_idx[..., None])[:, :, None], 0.0)
    total = (taps * weight.to(wide)).sum(-1)
    return F.silu(total if bias is None else total + bias.to(wide)).to(x.dtype)


def steps(dt: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float]) -> Tensor:
    """clamp(softplus(dt + dt_bias)), in float32 or wider."""
    wide = accumulator(dt.dtype)
    return F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)


def decays(A_log: Tensor) -> Tensor:
    """A = -exp(A_log), in float32 or wider."""
    return -A_log.to(accumulator(A_log.dtype)).exp()


def gate(y: Tensor, z: Tensor) -> Tensor:
    """y * silu(z)."""
    return (y.to(accumulator(y.dtype)) * F.silu(z.to(accumulator(z.dtype)))).to(y.dtype)


def mixer_sizes(num_heads: int, head_dim: int, n_groups: int, d_state: int) -> MambaSizes:
    """The sizes as Python integers. Errors: ValueError if n_groups does not divide num_heads."""
    if num_heads % n_groups:
        raise Rejected(f"num_heads={num_heads} must be divisible by n_groups={n_groups}")
    return MambaSizes(index(num_heads), index(head_dim), index(n_groups), index(d_state))


def check_dims(name: str, x: Tensor) -> None:
    """ValueError unless x, the argument `name`, is [b, s, w] or [t, w]."""
    if x.ndim not in (2, 3):
        raise Rejected(f"{name} is {list(x.shape)}; it is [b, s, w], or [t, w] with cu_seqlens")


def check_stream(name: str, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """ValueError unless x is [b, s, w], one sequence per row, or a stream [t, w] or [1, t, w] with `cu_seqlens`."""
    check_dims(name, x)
    is_stream = x.ndim == 2 or len(x) == 1
    if (cu_seqlens is None and x.ndim == 2) or (cu_seqlens is not None and not is_stream):
        rule = "without cu_seqlens; pass them, or [b, s, w]"
        if cu_seqlens is not None:
            rule = "with cu_seqlens; one stream is [t, w] or [1, t, w]"
        raise Rejected(f"{name} is {list(x.shape)} {rule}")
    if cu_seqlens is not None:
        check_offset_tensor("cu_seqlens", cu_seqlens)
