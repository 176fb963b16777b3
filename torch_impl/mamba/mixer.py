"""The Mamba2 mixer, with mamba-ssm's parameter names.

Without `context_parallel` it mixes complete sequences. With `context_parallel` each rank has a shard of the tokens:
projections and norm run on the shard, and the strategy runs the part between the projections.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_impl.collectives import accumulator
from torch_impl.contract import (
    Device,
    Dtype,
    Instance,
    NonNegative,
    PositiveInt,
    Rejected,
    Sharded,
    contract,
    dtype_name,
)
from torch_impl.layouts import TokenLayout
from torch_impl.mamba.mix import SsmParameters, check_stream, mix_columns, mixer_sizes

STEPS = (1e-3, 1e-1)  # the initial dt is log-uniform in this range
DECAYS = (1.0, 16.0)  # the initial -A is uniform in this range


class Strategy(Protocol):
    """How a mixer runs over context-parallel ranks: `mix` takes the output of in_proj and returns the input of norm."""

    def mix(self, projected_states: Tensor, cu_seqlens: Tensor | None = None) -> Tensor: ...


class GroupedNorm(nn.Module):
    """RMS norm over each of `groups` equal parts of the last dim, times a weight."""

    def __init__(self, width: int, groups: int, eps: float, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, y: Float[Tensor, "*a i"]) -> Float[Tensor, "*a i"]:
        parts = y.to(accumulator(y.dtype)).unflatten(-1, (self.groups, -1))
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight).to(y.dtype)


StrategyOf = Annotated[Callable[["Mamba2Mixer"], Strategy], Instance(Callable, "pass a function", shows_value=False)]


class Mamba2Mixer(nn.Module):
    """The Mamba2 mixer: projections, convolution, recurrence, gate and norm.

        x  "b s d"  or, packed,  "t d"     ->   the same     (`context_parallel` determines how cp shards s or t)
        parameters  "... cp=R": replicated; their full gradient is the SUM over cp

    z|x|B|C|dt = in_proj(x);  x|B|C = silu(conv(x|B|C));  dt = clamp(softplus(dt + dt_bias));  A = -exp(A_log)
    S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T;  y[t] = S[t] C[t] + D x[t];  out_proj(norm(y * silu(z)))

    `d_model` is the width of x. `conv_bias` adds a bias to the convolution, `bias` to the projections. `chunk_size` is
    the scan's, in tokens. `context_parallel` is a function from the mixer to its strategy, an object with `mix`.
    `cu_seqlens` are the offsets of the full padded stream. dt_bias, A_log and D are created in float32, or in float64
    if `dtype` is; all other parameters in `dtype`. All are on `device`.

    Cost:   no collective of its own.
    Errors: TypeError for sizes or offsets that are not integers, an x that is not a Tensor of the parameters' dtype;
            ValueError for sizes below 1, num_heads that n_groups does not divide, a width that norm_groups does not
            divide, a dt_limit that is not a range, norm_eps below 0, x of another width, [t, d] without cu_seqlens or
            [b, s, d] with it and b > 1, offsets that do not rise from 0 to t.
    Source: arXiv 2405.21060; the names follow mamba-ssm's Mamba2.
    """

    @contract
    def __init__(
        self,
        d_model: PositiveInt,
        *,
        num_heads: PositiveInt,
        head_dim: PositiveInt,
        n_groups: PositiveInt,
        d_state: PositiveInt,
        d_conv: PositiveInt = 4,
        chunk_size: PositiveInt = 256,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: NonNegative = 1e-5,
        norm_groups: PositiveInt | None = None,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        context_parallel: StrategyOf | None = None,
        device: Device | None = None,
        dtype: Dtype | None = None,
    ) -> None:
        super().__init__()
        # 1. Checks that involve several arguments.
        self.sizes = mixer_sizes(num_heads, head_dim, n_groups, d_state)
        norm_groups = n_groups if norm_groups is None else norm_groups
        if not 0 <= dt_limit[0] <= dt_limit[1]:
            raise Rejected(f"dt_limit={dt_limit} is not a range of steps; pass 0 <= low <= high")
        if self.sizes.inner % norm_groups:
            raise Rejected(f"norm_groups={norm_groups} must divide num_heads * head_dim = {self.sizes.inner}")
        self.d_model, self.d_conv, self.chunk_size, self.dt_limit = d_model, d_conv, chunk_size, dt_limit
        # 2. Parameters. Those of the recurrence are wide, since a decay's rounding error is repeated for every token.
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        wide_factory: dict[str, Any] = {"device": device, "dtype": accumulator(dtype or torch.get_default_dtype())}
        channels = self.sizes.channels
        self.in_proj = nn.Linear(d_model, self.sizes.width, bias=bias, **factory)
        self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=conv_bias, **factory)
        self.dt_bias = nn.Parameter(torch.empty(num_heads, **wide_factory))
        self.A_log = nn.Parameter(torch.empty(num_heads, **wide_factory))
        self.D = nn.Parameter(torch.ones(num_heads, **wide_factory))
        self.norm = GroupedNorm(self.sizes.inner, norm_groups, norm_eps, **factory)
        self.out_proj = nn.Linear(self.sizes.inner, d_model, bias=bias, **factory)
        self.reset_parameters()
        # 3. The strategy comes last, since it reads the parameters.
        self.context_parallel = None if context_parallel is None else context_parallel(self)

    def reset_parameters(self) -> None:
        """Initialize dt_bias, A_log and D as in the paper; projections and convolution initialize themselves."""
        with torch.no_grad():
            low, high = map(math.log, STEPS)
            dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            self.A_log.uniform_(*DECAYS).log_()
            self.D.fill_(1.0)

    @contract
    def forward(
        self, x: Sharded[Tensor, "... d"], cu_seqlens: Int[Tensor, " offsets"] | None = None
    ) -> Sharded[Tensor, "... d"]:
        """See the class."""
        if x.shape[-1] != self.d_model:
            raise Rejected(f"x is {list(x.shape)}; d_model={self.d_model} is its last dim")
        strategy = self.context_parallel
        # A strategy with a fixed TokenLayout needs no offsets, and validates its input itself.
        if strategy is None or isinstance(getattr(strategy, "layout", None), str):
            check_stream("x", x, cu_seqlens)
        mix = self._mix if strategy is None else strategy.mix
        return self.out_proj(self.norm(mix(self._project_in(x), cu_seqlens)))

    @contract("mamba.Mamba2Mixer")
    def mix(
        self, projected_states: Sharded[Tensor, "... w"], cu_seqlens: Int[Tensor, " offsets"] | None = None
    ) -> Sharded[Tensor, "... i"]:
        """Convolution, recurrence and gate of complete sequences: [b, s, w], or [t, w] with offsets.

        Errors: ValueError for offsets that do not rise from 0 to t, [t, w] without them, [b, s, w] with them and b > 1;
                TypeError for an unsupported dtype.
        """
        check_stream("projected_states", projected_states, cu_seqlens)
        return self._mix(projected_states, cu_seqlens)

    def _mix(self, projected_states: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        # A packed stream is one row; a new id marks the start of a sequence.
        rows = projected_states if projected_states.ndim == 3 else projected_states[None]
        ids = None
        if cu_seqlens is not None:
            layout = TokenLayout.packed(cu_seqlens, cp_size=1, cp_rank=0, total=rows.shape[1])
            ids = layout.sequence_ids.to(rows.device)[None]
        out = mix_columns(
            rows, self.sizes, self.ssm_parameters(), ids, chunk_size=self.chunk_size, dt_limit=self.dt_limit
        )
        return out if projected_states.ndim == 3 else out[0]

    def _project_in(self, x: Tensor) -> Tensor:
        """in_proj of x. TypeError if x has another dtype and neither autocast nor a hook casts it."""
        # Only after autocast and hooks is it known whether the dtypes differ, and torch's message names no tensor.
        try:
            return self.in_proj(x)
        except RuntimeError as error:
            weight = getattr(self.in_proj, "weight", x)
            if weight.device != x.device:
                raise Rejected(f"x is on {x.device}, in_proj.weight on {weight.device}; pass one device") from error
            if x.is_inference():
                raise Rejected("x was made in inference mode, and its gradient is asked for; pass x.clone()") from error
            if weight.dtype == x.dtype or "dtype" not in str(error):
                raise
            raise Rejected(
                f"x is {dtype_name(x)}, in_proj.weight is {dtype_name(weight)}; cast one, or use torch.autocast",
                TypeError,
            ) from error

    def ssm_parameters(self) -> SsmParameters:
        """The mixer's parameters between the projections, unsharded."""
        return SsmParameters(self.conv1d.weight[:, 0], self.conv1d.bias, self.dt_bias, self.A_log, self.D)
