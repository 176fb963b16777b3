"""Log-probability of the target token, from hidden states and the rows of the output weight that a rank holds.

Rank r of tp holds rows [vocab_start_index, vocab_end_index) of the weight, and of the hidden states either all
positions (replicated) or its block of them (sequence-parallel); which of the two, the length says. Logits are
made and used one chunk of positions at a time; the whole of them never exists.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives import uncast
from torch_impl.collectives.plain import gathered, scattered_sum, summed
from torch_impl.vocab_parallel import linear_chunks as chunks
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.asked import asked_of
from torch_impl.vocab_parallel.joint import SPENT
from torch_impl.vocab_parallel.linear_head import LinearHead
from torch_impl.vocab_parallel.packed_slots import checked_offsets, packed_slots
from torch_impl.vocab_parallel.scoring import next_ids
from torch_impl.vocab_parallel.sequence_gather import (
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    check_cut_over_cp,
    checked_cp_group,
)
from torch_impl.vocab_parallel.vocab_range import NO_ID


class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    """Log-probability of each target token from hidden states, for `.apply`; target already shifted and cut.

        tensor_parallel_hidden_states  "s/tp b d" or "s b d tp=I"     target  "b s"     output_weight_layer  "v/tp d"
        ->   "b s tp=I"

    out[b, t] = log softmax(h[t, b] W^T)[target[b, t]]

    Matrix products run in the input dtype, whatever autocast says; d logits are rounded to it once, and d W is
    summed over the chunks in float32 or wider and rounded once. The result is float32, for float64 float64.
    `chunk_size` counts positions of s and bounds the logits that exist at a time; None chooses a size for which
    they take 256 MiB (on a CPU 32 MiB) as float32. It may not differ between forward and backward, and does not.
    A target that nobody owns gives 0.0 and no gradient. A frozen weight, or frozen hidden states, cost nothing.

    Cost:   forward 1 all_gather of 3 * b*s numbers of 4 bytes (float64: 8); backward 1 all_reduce of s*b*d of
            them. Sequence-parallel: forward 1 all_gather of the hidden states more; backward the same again,
            and for the all_reduce 1 reduce_scatter. Saves hidden states and weight by reference and 12 bytes per
            token. One product forward, three backward.
    Errors: TypeError for a group that is none, ids that are no integers, tensors that are not floating; ValueError
            if hidden states and weight differ in d or dtype, hidden states and target in length or batch, or the
            range or chunk_size does not fit; RuntimeError in backward after inference_only=True.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor_parallel_hidden_states: Float[Tensor, "l b d"],
        target: Int[Tensor, "b s"],
        output_weight_layer: Float[Tensor, "v d"],
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Float[Tensor, "b s"]:
        hidden, weight = tensor_parallel_hidden_states, output_weight_layer
        function = "vocab_parallel.ChunkedDistributedHiddenStatesToLogprobs"
        head = LinearHead(function, tp_group, vocab_start_index, vocab_end_index, chunk_size)
        head.check(hidden, weight, target)
        ctx.group, ctx.chunk_size, ctx.inference_only = tp_group, chunk_size, inference_only
        ctx.is_cut = head.is_sequence_parallel(len(hidden), target.shape[1], 1)
        column = st.local_column(target.T.reshape(-1, 1), vocab_start_index, vocab_end_index)
        with uncast(hidden.device):
            states = _whole(ctx, hidden)
            positions = chunks.chunk_positions(states, len(weight), chunk_size)
            local = chunks.local_statistics(states, weight, column, positions)
        m_r, rest_r, z_r = st.exchanged(local, tp_group).unbind(1)
        whole, z_t = st.merged_normaliser(m_r, rest_r, 1.0), st.merged_target(z_r)
        column = torch.where((z_t == math.inf).unsqueeze(-1), st.NOBODYS, column)
        if not inference_only:
            ctx.save_for_backward(hidden, weight, column, *whole)
        return st.logprob_of(z_t, whole, 1.0).view(target.T.shape).T.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.inference_only:
            raise RuntimeError(SPENT)
        hidden, weight, column, *whole = ctx.saved_tensors
        of_hidden, _, of_weight, *_ = ctx.needs_input_grad
        with uncast(hidden.device):
            states = _whole(ctx, hidden)
            positions = chunks.chunk_positions(states, len(weight), ctx.chunk_size)
            asked = asked_of(column, grad_outputs[0].T.reshape(-1, 1))
            d_hidden, d_weight = chunks.gradients(
                states, weight, asked, st.Normaliser(*whole), positions, (of_hidden, of_weight)
            )
        if d_hidden is not None:  # each rank's term covers its own columns of the logits
            lengths = [len(hidden)] * ctx.group.size()
            d_hidden = scattered_sum(d_hidden, ctx.group, 0, lengths) if ctx.is_cut else summed(d_hidden, ctx.group)
        return d_hidden, None, d_weight, None, None, None, None, None


def _whole(ctx: Any, hidden: Float[Tensor, "l b d"]) -> Float[Tensor, "s b d"]:
    """All positions: "s/tp b d" -> "s b d" where the hidden states are sequence-parallel."""
    return gathered(hidden, ctx.group, 0, [len(hidden)] * ctx.group.size()) if ctx.is_cut else hidden


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Float[Tensor, "l b d"],
    output_weight_layer: Float[Tensor, "v d"] | None,
    output_weight: Float[Tensor, "v d"] | None,
    runtime_gather_output: bool,
    target: Int[Tensor, "b s"],
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    cu_seqlens_padded: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, "b u"]:
    """Log-probability of each next token from hidden states; `target` whole and unshifted.

        sequence-parallel   "s/cp:dual_chunk_swap/tp b d", "v/tp d cp=R", "b s"     ->   "b u tp=I cp=R",   u = s - 1
        replicated          "s/cp:dual_chunk_swap b d tp=I", "v/tp d cp=R", "b s"   ->   "b u tp=I cp=R"

    out[b, t] = log softmax(h[t, b] W^T)[target[b, t + 1]]

    h is `tensor_parallel_hidden_states`. W is `output_weight_layer`, or `output_weight` where that is None (tied to
    the embedding). Logits are never gathered, whatever `runtime_gather_output` is. With `cu_seqlens_padded` the stream
    of s tokens is packed, the layout over cp is `packed`, the shift stays inside each sequence, and the end of each
    scores 0.0. Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by
    cp or let each rank own a share. d W is this cp rank's term of a sum over cp.

    Cost:   that of `ChunkedDistributedHiddenStatesToLogprobs`; over cp forward 1 all_gather of b*s/cp numbers
            and backward 1 reduce_scatter of b*s. With offsets one host read of them.
    Errors: besides those, ValueError if both weights are None or s cannot be cut over cp, and for offsets those
            of `from_parallel_logits_to_logprobs_packed_sequences`.
    """
    function = "vocab_parallel.from_parallel_hidden_states_to_logprobs"
    weight = output_weight if output_weight_layer is None else output_weight_layer
    if weight is None:
        raise ValueError(f"{function}: output_weight_layer and output_weight are both None; pass the [v, d] weight")
    head = LinearHead(function, tp_group, vocab_start_index, vocab_end_index, chunk_size)
    head.check(tensor_parallel_hidden_states, weight, target)
    cp = 1 if cp_group is None else checked_cp_group(function, cp_group).size()
    rank, s, ids = 0 if cp_group is None else cp_group.rank(), target.shape[1], target.to(weight.device)
    check_cut_over_cp(function, s, cp)
    head.is_sequence_parallel(len(tensor_parallel_hidden_states), s, cp)
    owned = (vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only)
    slots = None
    if cu_seqlens_padded is None:
        own = _get_tokens_on_this_cp_rank(next_ids(ids, s), rank, cp)
    else:
        padded, _ = checked_offsets(function, cu_seqlens_padded, None, cp, s, "target")
        slots = packed_slots(padded, None, cp, ids.device)
        own = F.pad(slots.next_ids(ids, rank), (0, s // cp - len(slots.sequence)), value=NO_ID)
    scores = ChunkedDistributedHiddenStatesToLogprobs.apply(tensor_parallel_hidden_states, own, weight, *owned)
    if slots is not None:
        return slots.spread(scores, slots.position, max(s - 1, 0), cp_group)
    if cp_group is not None:
        scores = allgather_cp_sharded_tensor(scores, cp_group)
    return scores[:, : max(s - 1, 0)]
