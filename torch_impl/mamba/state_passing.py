"""State-passing context parallelism: each rank mixes its own tokens, with all heads.

Shards exchange only the last inputs of the convolution and one state per head, by all_gather, so the bytes sent do not
grow with the sequence length. Tokens stay on their rank.

Logarithms of decays are summed inside each segment: a sum has no terms of other segments and is not a difference of
long sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from torch_impl.collectives import accumulator, all_gather, large_tensors, no_autocast
from torch_impl.contract import PositiveInt, Sharded, contract
from torch_impl.mamba.convolution_halo import convolution_with_halo
from torch_impl.mamba.mix import SsmParameters, decays, gate, steps
from torch_impl.mamba.scan import _log_decays, scan
from torch_impl.mamba.segments import Blocks, Segments, blocks_of, segments_of, with_zeros
from torch_impl.mamba.strategy import GroupOrMesh, MixerStrategy, as_rows
from torch_impl.mamba.token_layouts import Order


class MambaStatePassing(MixerStrategy):
    """Run a Mamba2 mixer with tokens sharded over cp ranks, by passing states. It has no parameters itself.

        mix:  projected_states  "b s/cp:LAYOUT w"  or  "t/cp:packed w"   ->   the same with "i" columns
        parameters of `mixer`  "... cp=R"

    The state that enters segment k is the sum, over the earlier segments i of its sequence, of
    exp(sum of a[j], i < j < k) U[i]. U[i] is the state at the end of segment i as if no state entered it, and a[j] the
    logarithm of the decay over segment j.

    `mixer` has conv1d, dt_bias, A_log and D, which are read at each use. A rank differentiates them for its tokens: the
    full gradient is the SUM over cp. A data-parallel average over dp * cp needs the loss times cp_size.
    `layout` is contiguous, dual_chunk_swap (inside each sequence of a packed stream), or a TokenLayout in one of these
    orders that holds for every batch. n_groups must divide num_heads; head_dim and d_state may be anything.

    Cost:   per layer 2 all_gather forward, 2 reduce_scatter backward. Bytes of their inputs, forward:
            g * b * ((K - 1) * channels * itemsize + H * (P * N + 1) * wide); backward n times as many elements, all in
            float32 or wider (`wide` bytes). g is 1 for contiguous, 2 per sequence for dual_chunk_swap. Nothing depends
            on s. Saves the gathered states of n * g segments.
    Errors: ValueError for sizes below 1, num_heads that n_groups does not divide, parameters of other sizes,
            another layout; TypeError for a cp_group that is neither a ProcessGroup nor a 1-D DeviceMesh.
    """

    name = "MambaStatePassing"

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
    ) -> None:
        super().__init__(cp_group, num_heads, head_dim, n_groups, d_state, mixer, layout)

    @contract("mamba.MambaStatePassing")
    def mix(
        self, projected_states: Sharded[Tensor, "... w"], cu_seqlens: Int[Tensor, " offsets"] | None = None
    ) -> Sharded[Tensor, "... i"]:
        """Convolution, recurrence and gate, from the output of in_proj to the input of norm: see the class.

        `cu_seqlens` are the padded offsets of the full stream.

        Cost:   as the class.
        Errors: ValueError for a wrong number of columns, offsets that do not end at n * rows, a stream without
                offsets, another device than the weights'; TypeError for an unsupported dtype.
        """
        self._check_columns("projected_states", projected_states, self.sizes.width, "in_proj has")
        self._check_device("projected_states", projected_states, self.get_A_log())
        tokens = self._token_layout("projected_states", projected_states, cu_seqlens, self.cp_size)
        if not tokens.total:
            return projected_states[..., : self.sizes.inner]
        parameters = self.ssm_parameters()
        segments = segments_of(tokens, parameters.conv_weight.shape[1], self.chunk_size, projected_states.device)
        y = self._mix_rows(as_rows(projected_states), parameters, segments)
        return y.view(*projected_states.shape[:-1], self.sizes.inner)

    def _mix_rows(self, rows: Tensor, parameters: SsmParameters, segments: Segments) -> Tensor:
        """[b, t, w] -> [b, t, i]."""
        sizes = self.sizes
        # 1. The convolution, with the rows before each segment from other ranks.
        z, xBC, dt = rows.split([sizes.inner, sizes.channels, sizes.num_heads], dim=-1)
        xBC = convolution_with_halo(xBC, parameters.conv_weight, parameters.conv_bias, segments.halo, self.cp_group)
        x, B, C = xBC.split([sizes.inner, sizes.shared, sizes.shared], dim=-1)
        x = x.unflatten(-1, (sizes.num_heads, sizes.head_dim))
        B, C = (columns.unflatten(-1, (sizes.n_groups, sizes.d_state)) for columns in (B, C))
        dt, A = steps(dt, parameters.dt_bias, self.dt_limit), decays(parameters.A_log)
        D = parameters.D.reshape(sizes.num_heads, -1)
        # 2. The scan of each local segment, as if no state entered it.
        ids = segments.ids.expand(len(rows), -1)
        y, _ = scan(x, dt, A, B, C, D, self.chunk_size, ids)
        # 3. Add the outputs of the entering states: the recurrence is linear in the state.
        wide = accumulator(x.dtype)
        with no_autocast(x.device):
            u = x.to(wide) * dt[..., None]
            y = y + self._outputs_of_entering(u, dt * A, B.to(wide), C.to(wide), segments).to(y.dtype)
        return gate(y.flatten(-2), z)

    def _outputs_of_entering(self, u: Tensor, logs: Tensor, B: Tensor, C: Tensor, segments: Segments) -> Tensor:
        """[b, t, h, p]: the outputs of the states that enter this rank's segments."""
        # 1. The state and the decay that each local segment passes on.
        since = running_sums(logs, segments.ids)
        left = states_left(u, B, sums_after(logs, segments.ids), segments.leaving, segments.count)
        # 2. The states that enter, by one all-gather. 3. Their outputs.
        entering = self._entering(left, large_tensors.index_select(with_zeros(since), segments.last, 1), segments)
        return read_entering(C, since, entering, segments.entering)

    def _entering(self, left: Tensor, logs: Tensor, segments: Segments) -> Tensor:
        """[b, g, h, p, n]: the state that enters each segment, from the final states and log decays of all segments."""
        # 1. Gather the final state and the log decay of every segment, in one message.
        message = torch.cat([left.flatten(-2), logs[..., None]], -1)[None]
        gathered = all_gather(message, self.cp_group, out="R").transpose(0, 1).flatten(1, 2)  # b n*g h p*n+1
        # 2. Sort the segments of each sequence by position, b q m h ...
        order = segments.order
        by_sequence = large_tensors.index_select(gathered, order.flatten(), 1).unflatten(1, order.shape)
        states, logs = by_sequence[..., :-1], by_sequence[..., -1]
        # 3. Decays from the end of segment m to the end of segment k. With a row of zeros in front, row k + 1 gives the
        #    state after k + 1 segments, and row 0 the zero state before the first segment.
        through = _log_decays(logs, segments.sequences.expand(len(by_sequence), -1, -1)).exp()
        prefixes = F.pad(through, (0, 0, 0, 0, 1, 0))
        # 4. The row of each local segment, times the states.
        row = torch.arange(len(order), device=left.device)[:, None] * prefixes.shape[2] + segments.before
        weights = large_tensors.index_select(prefixes.flatten(1, 2), row.flatten(), 1).unflatten(1, row.shape)
        return torch.einsum("bqemh,bqmhx->bqehx", weights, states).flatten(1, 2).view_as(left)


def running_sums(logs: Float[Tensor, "b t h"], ids: Int64[Tensor, " t"]) -> Float[Tensor, "b t h"]:
    """The sum of logs from the start of each token's segment to the token; each segment is one run of equal `ids`.

    Cost: log2(t) additions of logs, for any segments. Saves a mask for each addition.
    """
    # Doubling: after each pass a token has the sum of the last `span` tokens of its segment.
    total, span = logs, 1
    while span < len(ids):
        is_same = (ids[span:] == ids[:-span])[:, None]
        earlier = torch.where(is_same, total[:, :-span], 0.0)
        total = total + F.pad(earlier, (0, 0, span, 0))
        span *= 2
    return total


def sums_after(logs: Float[Tensor, "b t h"], ids: Int64[Tensor, " t"]) -> Float[Tensor, "b t h"]:
    """The sum of logs over all later tokens in each token's segment."""
    from_here = running_sums(logs.flip(1), ids.flip(0)).flip(1)
    is_same = (ids[1:] == ids[:-1])[:, None]
    return F.pad(torch.where(is_same, from_here[:, 1:], 0.0), (0, 0, 0, 1))


def states_left(
    u: Float[Tensor, "b t h p"], B: Float[Tensor, "b t g n"], after: Float[Tensor, "b t h"], blocks: Blocks, count: int
) -> Float[Tensor, "b k h p n"]:
    """The sum of exp(after[t]) u[t] B[t]^T over each of `count` segments.

    Cost: t * h * p * n multiplications, and memory for one state per block.
    """
    u = blocks_of(u * after.exp()[..., None], blocks).unflatten(3, (B.shape[2], -1))
    states = torch.einsum("bmlgep,bmlgn->bmgepn", u, blocks_of(B, blocks)).flatten(2, 3)
    left = states.new_zeros(len(states), count, *states.shape[2:])
    return left.index_add(1, blocks.segment, states)


def read_entering(
    C: Float[Tensor, "b t g n"], since: Float[Tensor, "b t h"], entering: Float[Tensor, "b k h p n"], blocks: Blocks
) -> Float[Tensor, "b t h p"]:
    """exp(since[t]) entering C[t], with the state that enters t's segment; 0 if no state can enter it.

    Cost: t * h * p * n multiplications, and memory for one state per block.
    """
    states = large_tensors.index_select(entering, blocks.segment, 1).unflatten(2, (C.shape[2], -1))
    read = torch.einsum("bmlgn,bmgepn->bmlgep", blocks_of(C, blocks), states).flatten(3, 4).flatten(1, 2)
    return large_tensors.index_select(with_zeros(read), blocks.index, 1) * since.exp()[..., None]
