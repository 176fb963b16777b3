"""Hidden-parallel context parallelism: each rank has all tokens of its own heads while they are mixed.

Outside, rank r holds its tokens of all heads. One all-to-all before the convolution gives it all tokens of heads
r * H/n to (r + 1) * H/n and of the groups that they read, one after the gate gives it its own tokens back.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.layouts import TokenLayout
from torch_impl.layouts.columns import MambaSizes, conv_channels, projection_columns
from torch_impl.layouts.index_arrays import inverted
from torch_impl.layouts.kept import kept
from torch_impl.layouts.reorder import _permuted
from torch_impl.mamba.all_to_all import _all_to_all, own_tokens, sequential
from torch_impl.mamba.mix import mixed
from torch_impl.mamba.strategy import MixerStrategy, Order


class MambaContextParallel(MixerStrategy):
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

    name = "MambaContextParallel"

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
        super().__init__(cp_group, num_heads, head_dim, n_groups, d_state, mixer, layout=layout)
        self.fused, self.local = fused, self.sizes.local(self.cp_size)
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
        self._check_width(projected_states)
        tokens = self._tokens(projected_states, cu_seqlens, self.cp_size, layout)
        if self.cp_size == 1:
            return projected_states
        if not tokens.total:
            return projected_states[..., : self.local.width]
        rows = _batched(projected_states)
        there, back = _row_order(tokens, len(rows), rows.device)
        if self.fused:
            rows = rows if self.group_repeat_count == 1 else torch.cat(self._repeated(rows), -1)
            by_rank = _permuted(rows.flatten(0, 1), _columns(self.sizes, self.cp_size, rows.device), 1)
            arrived = _all_to_all(by_rank.unflatten(1, (self.cp_size, -1)).transpose(0, 1), self.cp_group)
            in_order = _permuted(arrived.flatten(0, 1), (there, back), 0)
        else:
            in_order = sequential(self._repeated(rows), cu_seqlens, tokens, self.cp_group)
        return in_order.view(*projected_states.shape[:-2], tokens.total, self.local.width)

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
        heads = f"{self.num_heads_local} of {self.sizes.num_heads} heads have"
        self._check_columns("output", output, self.local.inner, heads)
        tokens = self._tokens(output, cu_seqlens, 1, layout)
        if self.cp_size == 1:
            return output
        if not tokens.total:
            return F.pad(output, (0, self.d_inner - self.d_inner_local))
        rows = _batched(output)
        there, back = _row_order(tokens, len(rows), rows.device)
        if self.fused:
            send = _permuted(rows.flatten(0, 1), (back, there), 0).unflatten(0, (self.cp_size, -1))
            own = _all_to_all(send, self.cp_group).transpose(0, 1).flatten(1)
        else:
            own = own_tokens(rows, cu_seqlens, tokens, self.cp_group)
        return own.view(*output.shape[:-2], tokens.total // self.cp_size, self.d_inner)

    def mix(
        self, projected_states: Float[Tensor, "*a w"], cu_seqlens: Int[Tensor, " offsets"] | None = None
    ) -> Float[Tensor, "*a i"]:
        """All between in_proj and norm: see the class.

        Cost:   that of `pre_conv_ssm` and `post_conv_ssm`.
        Errors: those of `pre_conv_ssm`; ValueError for parameters of other sizes.
        """
        parameters, ids = self.ssm_parameters(), None  # first: what cannot be read is refused before anything is sent
        rows = self.pre_conv_ssm(projected_states, cu_seqlens)
        tokens = self._tokens(rows, cu_seqlens, 1)
        if len(tokens.cu_padded) > 2:
            ids = tokens.sequence_ids.to(rows.device).expand(_batched(rows).shape[:2])
        out = mixed(
            _batched(rows),
            self.local,
            parameters,
            ids,
            chunk_size=self.chunk_size,
            dt_limit=self.dt_limit,
        )
        return self.post_conv_ssm(out.view(*rows.shape[:-1], self.local.inner), cu_seqlens)

    def _repeated(self, rows: Float[Tensor, "b s w"]) -> tuple[Tensor, ...]:
        """z, x, B, C and dt, each group as often as ranks read it."""
        z, x, B, C, dt = rows.split(list(self.sizes.blocks), dim=-1)
        return z, x, self._repeat_group_state(B), self._repeat_group_state(C), dt

    def _repeat_group_state(self, state: Shaped[Tensor, "*a c"]) -> Shaped[Tensor, "*a d"]:
        """[.., G * N] -> [.., G * repeat * N]: each group as often as ranks read it, one copy after another."""
        groups = state.unflatten(-1, (self.sizes.n_groups, -1))
        return groups.repeat_interleave(self.group_repeat_count, dim=-2).flatten(-2)

    def _slice_vector_param(self, param: Shaped[Tensor, " h"]) -> Shaped[Tensor, " l"]:
        """This rank's block of a vector with one number, or as many, for each head. A view."""
        if len(param) % self.sizes.num_heads:
            raise ValueError(f"mamba.{self.name}: param is {list(param.shape)}; there are {self.sizes.num_heads} heads")
        size = len(param) // self.cp_size
        return param.narrow(0, self.cp_rank * size, size)

    def _slice_conv_param(self, param: Shaped[Tensor, "*a"]) -> Shaped[Tensor, "*b"]:
        """This rank's channels of the convolution's weight or bias."""
        if len(param) != self.sizes.channels:
            raise ValueError(
                f"mamba.{self.name}: param is {list(param.shape)}; the convolution has {self.sizes.channels} channels"
            )
        return param.index_select(0, _channels(self.sizes, self.cp_size, param.device)[self.cp_rank])

    def _unshareable(self) -> str | None:
        return self.sizes.uncuttable(self.cp_size)


def _batched(x: Tensor) -> Tensor:
    """[b, s, w] of a stream or a batch."""
    return x if x.ndim == 3 else x[None]


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


@kept
def _columns(sizes: MambaSizes, cp: int, device: torch.device) -> tuple[Int64[Tensor, " w"], Int64[Tensor, " w"]]:
    """Columns of all ranks, one rank after another, and back; of a group for each rank, where there are fewer."""
    there = projection_columns(replace(sizes, n_groups=max(sizes.n_groups, cp)), cp, device=device).flatten()
    return there, inverted(there)


@kept
def _channels(sizes: MambaSizes, cp: int, device: torch.device) -> Int64[Tensor, "n c"]:
    return conv_channels(sizes, cp, device=device)
