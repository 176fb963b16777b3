"""State-passing context parallelism: each rank mixes its own tokens of all heads.

What reaches across a cut is small: the last inputs of the convolution, and one state per head. Both are gathered, so
what is sent does not grow with the sequence. No token is moved.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.collectives import accumulator, all_gather
from torch_impl.kernels import rows_at
from torch_impl.mamba.conv import causal_conv
from torch_impl.mamba.mixer import SsmParameters, check_stream, checked_sizes, decays, gated, steps
from torch_impl.mamba.scan import _log_decays, chunked_scan
from torch_impl.mamba.segment_states import read_entering, running_sums, states_left, sums_after, with_zeros
from torch_impl.mamba.segments import Segments, segments_of
from torch_impl.mamba.shared_parameters import check_parameters, whole
from torch_impl.mamba.token_order import Order, checked_group_of, token_layout

NAME = "MambaStatePassing"


class MambaStatePassing:
    """What a Mamba2 mixer does between its projections, over cp ranks that keep their tokens. It owns no parameter.

        mix:  projected_states  "b s/cp:LAYOUT w"  or  "t/cp:packed w"   ->   the same with "i" columns
        parameters of `mixer`  "... cp=R"

    entry of a segment = sum over earlier i of its sequence of exp(sum of a between i and it) U[i];  U[i] is the state
    that segment i leaves behind if none enters it, a[i] the logarithm of its decay.

    `mixer` holds conv1d, dt_bias, A_log and D, read when they are used. The gradient on a rank is what its tokens
    give: the full one is the SUM over cp. A data-parallel average over dp * cp needs the loss times cp_size.
    `layout` is contiguous, dual_chunk_swap (inside each sequence of a packed stream), or such a TokenLayout of every
    batch. Any number of heads and groups that a mixer can have.

    Cost:   per layer 2 all_gather forward, 2 reduce_scatter backward. Bytes handed in, forward:
            g * b * ((K - 1) * channels * itemsize + H * (P * N + 1) * wide), and n times that backward, all of it
            in float32 or wider (`wide` bytes); g is 1 for contiguous, 2 for each sequence of dual_chunk_swap. None of
            it depends on s. Saves the gathered states of n * g segments.
    Errors: ValueError for sizes below 1, num_heads that n_groups does not divide, parameters of other sizes,
            another layout; TypeError for a cp_group that is neither ProcessGroup nor 1-D DeviceMesh.
    """

    def __init__(
        self,
        cp_group: ProcessGroup | DeviceMesh,
        num_heads: int,
        head_dim: int,
        n_groups: int,
        d_state: int,
        mixer: nn.Module,
        *,
        layout: Order = "dual_chunk_swap",
    ) -> None:
        self.cp_group = checked_group_of(NAME, cp_group)
        self.cp_size, self.cp_rank = self.cp_group.size(), self.cp_group.rank()
        self.sizes = checked_sizes(NAME, num_heads, head_dim, n_groups, d_state)
        check_parameters(NAME, mixer, self.sizes)
        self.mixer, self.layout = mixer, layout

    def mix(
        self, projected_states: Float[Tensor, "*a w"], cu_seqlens: Int[Tensor, " offsets"] | None = None
    ) -> Float[Tensor, "*a i"]:
        """All between in_proj and norm: see the class. `cu_seqlens` are the padded offsets of the whole stream.

        Errors: ValueError for other columns, offsets that do not end at n * rows, a stream without offsets.
        """
        if projected_states.shape[-1] != self.sizes.width:
            raise ValueError(
                f"mamba.{NAME}: projected_states is {list(projected_states.shape)}; "
                f"in_proj has {self.sizes.width} columns"
            )
        if cu_seqlens is not None or isinstance(self.layout, str):
            check_stream(NAME, projected_states, cu_seqlens)
        total, device = projected_states.shape[-2] * self.cp_size, projected_states.device
        tokens = token_layout(NAME, self.layout, total, cu_seqlens, self.cp_group, device)
        if not total:
            return projected_states[..., : self.sizes.inner]
        parameters, chunk_size = self.ssm_parameters(), getattr(self.mixer, "chunk_size", 256)
        segments = segments_of(tokens, parameters.conv_weight.shape[1], chunk_size, device)
        rows = projected_states if projected_states.ndim == 3 else projected_states[None]
        return self._mixed(rows, parameters, segments, chunk_size).view(*projected_states.shape[:-1], -1)

    def ssm_parameters(self) -> SsmParameters:
        """What the tokens are mixed with."""
        conv = self.get_conv1d_weight(), self.get_conv1d_bias()
        return SsmParameters(*conv, self.get_dt_bias(), self.get_A_log(), self.get_D())

    def get_conv1d_weight(self) -> Float[Tensor, "c k"]:
        """[channels, k]."""
        return whole(NAME, self.mixer, "conv1d.weight").squeeze(1)

    def get_conv1d_bias(self) -> Float[Tensor, " c"] | None:
        """[channels], or None."""
        return whole(NAME, self.mixer, "conv1d.bias")

    def get_dt_bias(self) -> Float[Tensor, " h"]:
        """[heads]."""
        return whole(NAME, self.mixer, "dt_bias")

    def get_A_log(self) -> Float[Tensor, " h"]:
        """[heads]."""
        return whole(NAME, self.mixer, "A_log")

    def get_D(self) -> Float[Tensor, " h"]:
        """[heads]; or [heads * head_dim], where D has one number per channel."""
        return whole(NAME, self.mixer, "D")

    def _mixed(self, rows: Tensor, parameters: SsmParameters, segments: Segments, chunk_size: int) -> Tensor:
        """[b, t, w] -> [b, t, i]."""
        sizes, dt_limit = self.sizes, getattr(self.mixer, "dt_limit", (0.0, math.inf))
        z, convolved, dt = rows.split([sizes.inner, sizes.channels, sizes.num_heads], dim=-1)
        convolved = self._convolved(convolved, parameters, segments)
        x, B, C = convolved.split([sizes.inner, sizes.shared, sizes.shared], dim=-1)
        x = x.unflatten(-1, (sizes.num_heads, sizes.head_dim))
        B, C = (part.unflatten(-1, (sizes.n_groups, sizes.d_state)) for part in (B, C))
        dt, A = steps(dt, parameters.dt_bias, dt_limit), decays(parameters.A_log)
        D = parameters.D.reshape(sizes.num_heads, -1)
        ids = segments.ids.expand(len(rows), -1)
        y, _ = chunked_scan(x, dt, A, B, C, D, chunk_size=chunk_size, seq_idx=ids)
        wide = accumulator(x.dtype)
        logs, u = dt * A, x.to(wide) * dt[..., None]
        since = running_sums(logs, segments.ids)
        left = states_left(u, B.to(wide), sums_after(logs, segments.ids), segments.leaving, segments.count)
        entering = self._entering(left, rows_at(with_zeros(since), segments.last, 1), segments)
        y = y + read_entering(C.to(wide), since, entering, segments.entering).to(y.dtype)
        return gated(y.flatten(-2), z)

    def _convolved(self, x: Tensor, parameters: SsmParameters, segments: Segments) -> Tensor:
        """The convolution of own rows, with those before each segment in front of it."""
        halo = segments.halo
        sent = rows_at(x, halo.sent, 1)[None]
        gathered = all_gather(sent, self.cp_group, out="R")  # b k c -> n b k c
        taken = rows_at(with_zeros(gathered.transpose(0, 1).flatten(1, 2)), halo.taken, 1)
        joined = rows_at(torch.cat([x, taken], 1), halo.joined, 1)
        ids = halo.ids.expand(len(x), -1)
        return rows_at(causal_conv(joined, parameters.conv_weight, parameters.conv_bias, ids), halo.own, 1)

    def _entering(self, left: Tensor, logs: Tensor, segments: Segments) -> Tensor:
        """[b, g, h, p, n]: the state that enters each segment, of what all segments leave and their log decays."""
        sent = torch.cat([left.flatten(-2), logs[..., None]], -1)[None]
        gathered = all_gather(sent, self.cp_group, out="R").transpose(0, 1).flatten(1, 2)  # b n*g h p*n+1
        each = rows_at(gathered, segments.order.flatten(), 1).unflatten(1, segments.order.shape)
        states, logs = each[..., :-1], each[..., -1]  # b q m h ...
        through = _log_decays(logs, segments.sequences.expand(len(each), -1, -1)).exp()
        # Row k of each sequence: what k segments leave together, and nothing where none comes before.
        together = F.pad(through, (0, 0, 0, 0, 1, 0))
        row = torch.arange(len(segments.order), device=left.device)[:, None] * together.shape[2] + segments.before
        chosen = rows_at(together.flatten(1, 2), row.flatten(), 1).unflatten(1, row.shape)
        return torch.einsum("bqemh,bqmhx->bqehx", chosen, states).flatten(1, 2).view_as(left)
