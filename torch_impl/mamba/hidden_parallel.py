"""Hidden-parallel context parallelism: inside the mixer each rank has all tokens of its heads.

Outside the mixer, rank r has its tokens with all heads. An all-to-all before the convolution gives it all tokens of
heads r * H/n to (r + 1) * H/n and of the groups that these read. An all-to-all after the gate returns its tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor, nn

from torch_impl.contract import PositiveInt, Sharded, contract
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.cache import cached
from torch_impl.layouts.columns import MambaSizes, conv_channels, projection_columns
from torch_impl.layouts.index_arrays import inverse_permutation
from torch_impl.layouts.reorder import _permute
from torch_impl.mamba.all_to_all import _all_to_all, reference_all_to_all_cp2hp, reference_all_to_all_hp2cp
from torch_impl.mamba.mix import mix_columns
from torch_impl.mamba.strategy import GroupOrMesh, MixerStrategy, as_rows
from torch_impl.mamba.token_layouts import Order


class MambaContextParallel(MixerStrategy):
    """Run a Mamba2 mixer with its heads sharded over cp ranks. It has no parameters itself.

        mix:  projected_states  "b s/cp:LAYOUT w"  or  "t/cp:packed w"   ->   the same with "i" columns
        parameters of `mixer`  "... cp=R"

    `mixer` has conv1d, dt_bias, A_log and D, which are read at each use. A rank differentiates them for its heads: the
    full gradient is the SUM over cp. A data-parallel average over dp * cp needs the loss times cp_size.
    `layout` is the order in which sequences are sharded: contiguous, dual_chunk_swap (inside each sequence of a packed
    stream), or a TokenLayout that holds for every batch. `fused=False` is the readable form: five all-to-alls, for z,
    x, B, C and dt one by one, with the same results to the bit.

    Cost:   per layer 2 all_to_all forward, 2 backward; none in a group of one. Bytes of their inputs, each way:
            b * s * itemsize * (3 * H * P + 2 * max(G, n) * N + H) / n.  Saves indices only.
    Errors: ValueError for sizes below 1, heads or groups that cp ranks cannot share, parameters of other sizes,
            another layout; TypeError for a cp_group that is neither a ProcessGroup nor a 1-D DeviceMesh.
    """

    name = "MambaContextParallel"

    @contract
    def __init__(
        self,
        cp_group: GroupOrMesh,
        num_heads: PositiveInt,
        head_dim: PositiveInt,
        n_groups: PositiveInt,
        d_state: PositiveInt,
        mixer: nn.Module,
        *,
        layout: Order = "dual_chunk_swap",
        fused: bool = True,
    ) -> None:
        super().__init__(cp_group, num_heads, head_dim, n_groups, d_state, mixer, layout)
        self.fused, self.local = fused, self.sizes.local(self.cp_size)
        self.d_inner, self.d_inner_local = self.sizes.inner, self.local.inner
        self.num_heads_local, self.n_groups_local = self.local.num_heads, self.local.n_groups
        # The number of ranks that read the same group, above 1 if there are fewer groups than ranks.
        self.group_repeat_count = max(self.cp_size // self.sizes.n_groups, 1)

    @contract("mamba.MambaContextParallel")
    def pre_conv_ssm(
        self,
        projected_states: Sharded[Tensor, "... w"],
        cu_seqlens: Int[Tensor, " offsets"] | None = None,
        *,
        layout: Order | None = None,
    ) -> Sharded[Tensor, "... w/cp"]:
        """All tokens, in order, with this rank's columns z|x|B|C|dt.

            projected_states  "b s/cp:LAYOUT w"  or  "t/cp:packed w"   ->   "b s w/cp"  or  "t w/cp"

        `cu_seqlens`, with inputs [t, w] or [1, t, w], are the padded offsets of the full stream. If several ranks read
        a column of B or C, its gradient is the sum of their gradients.

        Cost:   1 all_to_all forward, 1 backward. One host read of the offsets per batch, shared by all layers.
        Errors: ValueError for a wrong number of columns, offsets that do not end at n * rows, a stream without
                offsets; TypeError for an unsupported dtype.
        """
        self._check_columns("projected_states", projected_states, self.sizes.width, "in_proj has")
        tokens = self._token_layout("projected_states", projected_states, cu_seqlens, self.cp_size, layout)
        return self._heads_for_tokens(projected_states, cu_seqlens, tokens)

    def _heads_for_tokens(self, projected: Tensor, cu_seqlens: Tensor | None, tokens: TokenLayout) -> Tensor:
        if self.cp_size == 1:
            return projected
        # Without tokens, return a result of the right shape that still depends on the input, for autograd.
        if not tokens.total:
            return projected[..., : self.local.width]
        rows = as_rows(projected)
        to_sequence, to_ranks = _row_order(tokens, len(rows), rows.device)
        if self.fused:
            # 1. Copy each group for every rank that reads it, and pack the columns of rank 0, rank 1, ...
            rows = rows if self.group_repeat_count == 1 else torch.cat(self._repeat_groups(rows), -1)
            by_rank = _permute(rows.flatten(0, 1), _columns(self.sizes, self.cp_size, rows.device), 1)
            # 2. Exchange: block j has this rank's tokens with rank j's columns, and goes to rank j.
            received = _all_to_all(by_rank.unflatten(1, (self.cp_size, -1)).transpose(0, 1), self.cp_group)
            # 3. Tokens arrive rank by rank; put them in the order of the sequence, in one gather.
            in_order = _permute(received.flatten(0, 1), (to_sequence, to_ranks), 0)
        else:
            in_order = reference_all_to_all_cp2hp(self._repeat_groups(rows), cu_seqlens, tokens, self.cp_group)
        return in_order.view(*projected.shape[:-2], tokens.total, self.local.width)

    @contract("mamba.MambaContextParallel")
    def post_conv_ssm(
        self,
        output: Sharded[Tensor, "... i/cp"],
        cu_seqlens: Int[Tensor, " offsets"] | None = None,
        *,
        layout: Order | None = None,
    ) -> Sharded[Tensor, "... i"]:
        """This rank's tokens with all heads.

            output  "b s i/cp"  or  "t i/cp"   ->   "b s/cp:LAYOUT i"  or  "t/cp:packed i"

        Cost:   1 all_to_all forward, 1 backward.
        Errors: as `pre_conv_ssm`; offsets must end at the number of rows.
        """
        heads = f"{self.num_heads_local} of {self.sizes.num_heads} heads have"
        self._check_columns("output", output, self.local.inner, heads)
        tokens = self._token_layout("output", output, cu_seqlens, 1, layout)
        return self._tokens_for_heads(output, cu_seqlens, tokens)

    def _tokens_for_heads(self, output: Tensor, cu_seqlens: Tensor | None, tokens: TokenLayout) -> Tensor:
        if self.cp_size == 1:
            return output
        if not tokens.total:
            return F.pad(output, (0, self.d_inner - self.d_inner_local))
        rows = as_rows(output)
        to_sequence, to_ranks = _row_order(tokens, len(rows), rows.device)
        if self.fused:
            # The three steps of `_heads_for_tokens`, in reverse.
            send = _permute(rows.flatten(0, 1), (to_ranks, to_sequence), 0).unflatten(0, (self.cp_size, -1))
            local_tokens = _all_to_all(send, self.cp_group).transpose(0, 1).flatten(1)
        else:
            local_tokens = reference_all_to_all_hp2cp(rows, cu_seqlens, tokens, self.cp_group)
        return local_tokens.view(*output.shape[:-2], tokens.total // self.cp_size, self.d_inner)

    @contract("mamba.MambaContextParallel")
    def mix(
        self, projected_states: Sharded[Tensor, "... w"], cu_seqlens: Int[Tensor, " offsets"] | None = None
    ) -> Sharded[Tensor, "... i"]:
        """Convolution, recurrence and gate, from the output of in_proj to the input of norm: see the class.

        Cost:   `pre_conv_ssm` and `post_conv_ssm`.
        Errors: as `pre_conv_ssm`; ValueError for parameters of other sizes.
        """
        parameters = self.ssm_parameters()  # first, to reject a sharded parameter before any collective
        self._check_columns("projected_states", projected_states, self.sizes.width, "in_proj has")
        self._check_device("projected_states", projected_states, parameters.A_log)
        tokens = self._token_layout("projected_states", projected_states, cu_seqlens, self.cp_size)
        # 1. All tokens of this rank's heads, in the order of the sequence.
        local = self._heads_for_tokens(projected_states, cu_seqlens, tokens)
        rows = as_rows(local)
        # 2. Convolution, scan and gate of these heads.
        ids = None  # one sequence per row
        if len(tokens.cu_padded) > 2:
            ids = tokens.sequence_ids.to(rows.device).expand(rows.shape[:2])
        out = mix_columns(rows, self.local, parameters, ids, chunk_size=self.chunk_size, dt_limit=self.dt_limit)
        # 3. This rank's tokens with all heads.
        return self._tokens_for_heads(out.view(*local.shape[:-1], self.local.inner), cu_seqlens, tokens)

    def _repeat_groups(self, rows: Float[Tensor, "b s w"]) -> tuple[Tensor, ...]:
        """z, x, B, C and dt, with each group repeated for every rank that reads it."""
        z, x, B, C, dt = rows.split(list(self.sizes.blocks), dim=-1)
        return z, x, self._repeat_group_state(B), self._repeat_group_state(C), dt

    def _repeat_group_state(self, state: Shaped[Tensor, "*a c"]) -> Shaped[Tensor, "*a d"]:
        """[.., G * N] -> [.., G * repeat * N]: one copy of each group for every rank that reads it, side by side."""
        groups = state.unflatten(-1, (self.sizes.n_groups, -1))
        return groups.repeat_interleave(self.group_repeat_count, dim=-2).flatten(-2)

    def _slice_vector_param(self, param: Shaped[Tensor, "h *e"]) -> Shaped[Tensor, "l *e"]:
        """This rank's block of a vector with one or more numbers per head. A view."""
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

    def _indivisible(self) -> str | None:
        return self.sizes.indivisible(self.cp_size)


def _row_order(
    tokens: TokenLayout, batch: int, device: torch.device
) -> tuple[Int64[Tensor, " t"], Int64[Tensor, " t"]]:
    """(the row in [n, b, s] of each token of [b, n * s], the inverse)."""
    to_sequence, to_ranks = tokens.inverse.to(device), tokens.index.flatten().to(device)
    if batch == 1:
        return to_sequence, to_ranks
    # The rows of a batch arrive as [rank, row, token]: extend the index of one row to all rows.
    local, row = tokens.total // tokens.cp_size, torch.arange(batch, device=device)[:, None]
    to_sequence = (to_sequence // local * batch + row) * local + to_sequence % local
    to_ranks = (to_ranks.view(tokens.cp_size, 1, local) + row * tokens.total).flatten()
    return to_sequence.flatten(), to_ranks


@cached(16)
def _columns(sizes: MambaSizes, cp: int, device: torch.device) -> tuple[Int64[Tensor, " w"], Int64[Tensor, " w"]]:
    """(the columns of all ranks, rank by rank, the inverse), after groups are repeated to at least one per rank."""
    columns = projection_columns(replace(sizes, n_groups=max(sizes.n_groups, cp)), cp, device=device).flatten()
    return columns, inverse_permutation(columns)


@cached(16)
def _channels(sizes: MambaSizes, cp: int, device: torch.device) -> Int64[Tensor, "n c"]:
    return conv_channels(sizes, cp, device=device)
