"""Hidden-parallel context parallelism: each rank has all tokens of its own heads while they are mixed.

Outside, rank r holds its tokens of all heads. One all-to-all before the convolution gives it all tokens of heads
r * H/n to (r + 1) * H/n and of the groups that they read, one after the gate gives it its own tokens back.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.kernels import rows_at
from torch_impl.layouts import (
    TokenLayout,
    _deinterleave_packed_seqs,
    _redo_attention_load_balancing,
    _reinterleave_packed_seqs,
    _undo_attention_load_balancing,
)
from torch_impl.layouts.columns import MambaSizes, conv_channels, projection_columns
from torch_impl.layouts.reorder import _permuted
from torch_impl.mamba.all_to_all import _all_to_all, _all_to_all_cp2hp, _all_to_all_hp2cp
from torch_impl.mamba.mixer import SsmParameters, check_stream, checked_sizes, mixed
from torch_impl.mamba.shared_parameters import check_parameters, whole
from torch_impl.mamba.token_order import Order, checked_group_of, token_layout

NAME = "MambaContextParallel"


class MambaContextParallel:
    """Redistribution and sliced parameters of a Mamba2 mixer over cp ranks. It owns no parameter.

        mix:  projected_states  "b s/cp:LAYOUT w"  or  "t/cp:packed w"   ->   the same with "i" columns
        parameters of `mixer`  "... cp=R"

    `mixer` holds conv1d, dt_bias, A_log and D, read when they are used. The gradient on a rank is what its heads
    give: the full one is the SUM over cp. A data-parallel average over dp * cp needs the loss times cp_size.
    `layout` is the order in which sequences are cut: contiguous, dual_chunk_swap (inside each sequence of a packed
    stream), or the TokenLayout of every batch. `fused=False` is five exchanges, one for each of z, x, B, C and dt.

    Cost:   per layer 2 all_to_all forward, 2 backward; none in a group of one. Bytes handed in, each way:
            b * s * itemsize * (3 * H * P + 2 * max(G, n) * N + H) / n.  Saves indices only.
    Errors: ValueError for sizes below 1, heads or groups that cp ranks cannot share, parameters of other sizes,
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
        fused: bool = True,
    ) -> None:
        self.cp_group = checked_group_of(NAME, cp_group)
        self.cp_size, self.cp_rank = self.cp_group.size(), self.cp_group.rank()
        self.sizes = checked_sizes(NAME, num_heads, head_dim, n_groups, d_state)
        if reason := self.sizes.uncuttable(self.cp_size):
            raise ValueError(f"mamba.{NAME}: {reason}")
        check_parameters(NAME, mixer, self.sizes)
        self.local = self.sizes.local(self.cp_size)
        self.mixer, self.layout, self.fused = mixer, layout, fused
        self.d_inner, self.d_inner_local = self.sizes.inner, self.local.inner
        self.num_heads_local, self.n_groups_local = self.local.num_heads, self.local.n_groups
        self.group_repeat_count = max(self.cp_size // n_groups, 1)

    def pre_conv_ssm(
        self,
        projected_states: Float[Tensor, "*a w"],
        cu_seqlens: Int[Tensor, " offsets"] | None = None,
        *,
        layout: TokenLayout | None = None,
    ) -> Float[Tensor, "*b v"]:
        """All tokens, in order, of this rank's columns z|x|B|C|dt.

            projected_states  "b s/cp:LAYOUT w"  or  "t/cp:packed w"   ->   "b s w/cp"  or  "t w/cp"

        `cu_seqlens` are the padded offsets of the whole stream, and come with [t, w] or [1, t, w]. The gradient of
        a column of B or C that several ranks hold is their sum.

        Cost:   1 all_to_all forward, 1 backward. One host read of the offsets per batch, shared by all layers.
        Errors: ValueError for other columns, offsets that do not end at n * rows, a stream without offsets.
        """
        if projected_states.shape[-1] != self.sizes.width:
            raise ValueError(
                f"mamba.{NAME}: projected_states is {list(projected_states.shape)}; "
                f"in_proj has {self.sizes.width} columns"
            )
        tokens = self._layout(projected_states, cu_seqlens, layout, self.cp_size)
        if self.cp_size == 1:
            return projected_states
        if not self.fused:
            return self._unfused_pre(projected_states, cu_seqlens, tokens)
        rows = _batched(projected_states)
        columns = _columns(self.sizes, self.cp_size, rows.device)
        send = rows_at(rows.flatten(0, 1), columns, 1).unflatten(1, (self.cp_size, -1)).transpose(0, 1)
        arrived = _all_to_all(send, self.cp_group)
        there, back = _row_order(tokens, len(rows), rows.device)
        sequential = _permuted(arrived.flatten(0, 1), (there, back), 0)
        return sequential.view(*_shape(projected_states, tokens.total), -1)

    def post_conv_ssm(
        self,
        output: Float[Tensor, "*a i"],
        cu_seqlens: Int[Tensor, " offsets"] | None = None,
        *,
        layout: TokenLayout | None = None,
    ) -> Float[Tensor, "*b j"]:
        """This rank's tokens of all heads.

            output  "b s i/cp"  or  "t i/cp"   ->   "b s/cp:LAYOUT i"  or  "t/cp:packed i"

        Cost:   1 all_to_all forward, 1 backward.
        Errors: as `pre_conv_ssm`, of all rows.
        """
        if output.shape[-1] != self.local.inner:
            raise ValueError(
                f"mamba.{NAME}: output is {list(output.shape)}; "
                f"{self.num_heads_local} of {self.sizes.num_heads} heads have {self.local.inner} columns"
            )
        tokens = self._layout(output, cu_seqlens, layout, 1)
        if self.cp_size == 1:
            return output
        if not self.fused:
            return self._unfused_post(output, cu_seqlens, tokens)
        rows = _batched(output)
        there, back = _row_order(tokens, len(rows), rows.device)
        send = _permuted(rows.flatten(0, 1), (back, there), 0).unflatten(0, (self.cp_size, -1))
        arrived = _all_to_all(send, self.cp_group)
        own = arrived.transpose(0, 1).flatten(1)
        return own.view(*_shape(output, tokens.total // self.cp_size), -1)

    def mix(
        self, projected_states: Float[Tensor, "*a w"], cu_seqlens: Int[Tensor, " offsets"] | None = None
    ) -> Float[Tensor, "*a i"]:
        """All between in_proj and norm: see the class."""
        rows = self.pre_conv_ssm(projected_states, cu_seqlens)
        ids = None
        tokens = self._layout(rows, cu_seqlens, None, 1)
        if len(tokens.cu_padded) > 2:
            ids = tokens.sequence_ids.to(rows.device).expand(_batched(rows).shape[:2])
        out = mixed(
            _batched(rows),
            self.local,
            self.ssm_parameters(),
            ids,
            chunk_size=getattr(self.mixer, "chunk_size", 256),
            dt_limit=getattr(self.mixer, "dt_limit", (0.0, float("inf"))),
        )
        return self.post_conv_ssm(out.view(*rows.shape[:-1], self.local.inner), cu_seqlens)

    def ssm_parameters(self) -> SsmParameters:
        """What this rank's heads are mixed with."""
        conv = self.get_conv1d_weight(), self.get_conv1d_bias()
        return SsmParameters(*conv, self.get_dt_bias(), self.get_A_log(), self.get_D())

    def get_conv1d_weight(self) -> Float[Tensor, "c k"]:
        """[channels, k] of this rank's x|B|C."""
        return self._slice_conv_param(whole(NAME, self.mixer, "conv1d.weight")).squeeze(1)

    def get_conv1d_bias(self) -> Float[Tensor, " c"] | None:
        """[channels] of this rank's x|B|C, or None."""
        bias = whole(NAME, self.mixer, "conv1d.bias")
        return None if bias is None else self._slice_conv_param(bias)

    def get_dt_bias(self) -> Float[Tensor, " h"]:
        """[heads] of this rank."""
        return self._slice_vector_param(whole(NAME, self.mixer, "dt_bias"))

    def get_A_log(self) -> Float[Tensor, " h"]:
        """[heads] of this rank."""
        return self._slice_vector_param(whole(NAME, self.mixer, "A_log"))

    def get_D(self) -> Float[Tensor, " h"]:
        """[heads] of this rank; or [heads * head_dim], where D has one number per channel."""
        return self._slice_vector_param(whole(NAME, self.mixer, "D"))

    def _repeat_group_state(self, state: Shaped[Tensor, "*a c"]) -> Shaped[Tensor, "*a d"]:
        """[.., G * N] -> [.., G * repeat * N]: each group as often as ranks read it, one copy after another."""
        groups = state.unflatten(-1, (self.sizes.n_groups, -1))
        return groups.repeat_interleave(self.group_repeat_count, dim=-2).flatten(-2)

    def _slice_vector_param(self, param: Shaped[Tensor, " h"]) -> Shaped[Tensor, " l"]:
        """This rank's block of a vector with one number, or as many, for each head. A view."""
        if len(param) % self.sizes.num_heads:
            raise ValueError(f"mamba.{NAME}: param is {list(param.shape)}; there are {self.sizes.num_heads} heads")
        size = len(param) // self.cp_size
        return param.narrow(0, self.cp_rank * size, size)

    def _slice_conv_param(self, param: Shaped[Tensor, "*a"]) -> Shaped[Tensor, "*b"]:
        """This rank's channels of the convolution's weight or bias."""
        if len(param) != self.sizes.channels:
            raise ValueError(
                f"mamba.{NAME}: param is {list(param.shape)}; the convolution has {self.sizes.channels} channels"
            )
        return param.index_select(0, _channels(self.sizes, self.cp_size, param.device)[self.cp_rank])

    def _layout(self, x: Tensor, cu_seqlens: Tensor | None, layout: TokenLayout | None, ranks: int) -> TokenLayout:
        order = self.layout if layout is None else layout
        if cu_seqlens is not None or not isinstance(order, TokenLayout):
            check_stream(NAME, x, cu_seqlens)
        return token_layout(NAME, order, x.shape[-2] * ranks, cu_seqlens, self.cp_group, x.device)

    def _unfused_pre(self, x: Tensor, cu_seqlens: Tensor | None, tokens: TokenLayout) -> Tensor:
        z, inner, B, C, dt = x.split(list(self.sizes.blocks), dim=-1)
        parts = z, inner, self._repeat_group_state(B), self._repeat_group_state(C), dt
        return torch.cat([self._sequential(part, cu_seqlens, tokens) for part in parts], -1)

    def _sequential(self, part: Tensor, cu_seqlens: Tensor | None, tokens: TokenLayout) -> Tensor:
        """One of the five, exchanged and put in order by the functions of the page."""
        if tokens.kind == "packed" and cu_seqlens is not None:
            arrived = _all_to_all_cp2hp(part.flatten(0, -2), self.cp_group, 1)
            majored = _deinterleave_packed_seqs(arrived, cu_seqlens // self.cp_size, self.cp_size)
            rows = _undo_attention_load_balancing(majored, self.cp_size, cu_seqlens)
            return rows.view(*part.shape[:-2], *rows.shape)
        rows = _batched(part)
        arrived = _all_to_all_cp2hp(rows, self.cp_group, len(rows))
        if tokens.kind == "dual_chunk_swap":
            return _undo_attention_load_balancing(arrived, self.cp_size)
        return rows_at(arrived, tokens.inverse.to(part.device), 1).view(*_shape(part, tokens.total), -1)

    def _unfused_post(self, x: Tensor, cu_seqlens: Tensor | None, tokens: TokenLayout) -> Tensor:
        if tokens.kind == "packed" and cu_seqlens is not None:
            majored = _redo_attention_load_balancing(x.flatten(0, -2), self.cp_size, cu_seqlens)
            rows = _reinterleave_packed_seqs(majored, cu_seqlens // self.cp_size, self.cp_size)
            own = _all_to_all_hp2cp(rows, self.cp_group, 1)
            return own.view(*x.shape[:-2], *own.shape)
        rows = _batched(x)
        if tokens.kind == "dual_chunk_swap":
            rows = _redo_attention_load_balancing(rows, self.cp_size)
        else:
            rows = rows_at(rows, tokens.index.flatten().to(x.device), 1)
        own = _all_to_all_hp2cp(rows, self.cp_group, len(rows))
        return own.view(*_shape(x, own.shape[1]), -1)


def _batched(x: Tensor) -> Tensor:
    """[b, s, w] of a stream or a batch."""
    return x if x.ndim == 3 else x[None]


def _shape(x: Tensor, rows: int) -> tuple[int, ...]:
    """The dims before the columns, with so many rows."""
    return (*x.shape[:-2], rows)


def _row_order(
    tokens: TokenLayout, batch: int, device: torch.device
) -> tuple[Int64[Tensor, " t"], Int64[Tensor, " t"]]:
    """Row in [n, b, s] of each token in [b, n * s], and back."""
    there, back = tokens.inverse.to(device), tokens.index.flatten().to(device)
    if batch == 1:
        return there, back
    local, row = tokens.total // tokens.cp_size, torch.arange(batch, device=device)[:, None]
    there = (there // local * batch + row) * local + there % local
    back = (back.view(tokens.cp_size, 1, local) + row * tokens.total).flatten()
    return there.flatten(), back


@lru_cache(maxsize=16)
def _columns(sizes: MambaSizes, cp: int, device: torch.device) -> Int64[Tensor, " w"]:
    """Columns of all ranks, one rank after another; every layer of a model has the same."""
    return projection_columns(sizes, cp, device=device).flatten()


@lru_cache(maxsize=16)
def _channels(sizes: MambaSizes, cp: int, device: torch.device) -> Int64[Tensor, "n c"]:
    return conv_channels(sizes, cp, device=device)
