"""Log-probability of the target token, from hidden states and the rows of the output weight that a rank holds.

Rank r of tp holds rows [vocab_start_index, vocab_end_index) of the weight, and of the hidden states either all
positions (replicated) or its block of them (sequence-parallel); which of the two, the length says. Logits are
made and used one chunk of positions at a time; the whole of them never exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator, uncast
from torch_impl.collectives.plain import gathered, scattered_sum, summed
from torch_impl.vocab_parallel import arguments as a
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.fused_logprob import SPENT, Asked, Plan, asked_of, chosen, rows_at_once, write_gradient
from torch_impl.vocab_parallel.next_token import next_ids
from torch_impl.vocab_parallel.packed import checked_offsets, packed_slots
from torch_impl.vocab_parallel.sequence_gather import (
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    check_cut_over_cp,
    checked_cp_group,
)
from torch_impl.vocab_parallel.statistics import row_blocks
from torch_impl.vocab_parallel.vocab_range import NO_ID

HIDDEN, WEIGHT = "tensor_parallel_hidden_states", "output_weight_layer"

# Logits of an automatic chunk, counted in float32; it has so many rows at least, for the sake of the products.
CHUNK_BYTES = {"cpu": 32 << 20}

CHUNK_BYTES_ELSEWHERE = 256 << 20

FEWEST_ROWS = 128

# A chunk's rows are whole as far as a rank goes: what the ranks tell each other is exchanged once, after all chunks.
PLAN = Plan("vocab_parallel.linear_logprob", None, whole_rows=True)


@dataclass(frozen=True)
class LinearHead:
    """Rows [vocab_start, vocab_end) of the weight; `function` is what an error calls the caller."""

    function: str
    group: ProcessGroup
    vocab_start: int
    vocab_end: int
    chunk_size: int | None

    def check(self, hidden: Float[Tensor, "l b d"], weight: Float[Tensor, "v d"], ids: Int[Tensor, "b s"]) -> None:
        """Refuse tensors that do not fit each other or the range."""
        a.checked_tp_group(self.function, "tp_group", self.group)
        for name, tensor in ((HIDDEN, hidden), (WEIGHT, weight)):
            if not tensor.dtype.is_floating_point:
                raise TypeError(f"{self.function}: {name} is {a.dtype_name(tensor)}; it must be floating")
        a.check_ids(self.function, "target", ids)
        a.check_chunk_size(self.function, self.chunk_size)
        if hidden.ndim != 3 or ids.ndim != 2 or hidden.shape[1] != len(ids):
            raise ValueError(
                f"{self.function}: {HIDDEN} is {list(hidden.shape)} but target is {list(ids.shape)}; "
                "they must be [s, b, d] and [b, s]"
            )
        if weight.ndim != 2 or weight.shape[1] != hidden.shape[2]:
            raise ValueError(
                f"{self.function}: {WEIGHT} is {list(weight.shape)} but hidden states have d={hidden.shape[2]}"
            )
        if weight.dtype != hidden.dtype:
            theirs = a.dtype_name(hidden)
            raise ValueError(f"{self.function}: {WEIGHT} is {a.dtype_name(weight)} but hidden states are {theirs}")
        if not 0 <= self.vocab_start <= self.vocab_end <= self.vocab_start + len(weight):
            raise ValueError(
                f"{self.function}: vocab range [{self.vocab_start}, {self.vocab_end}) does not fit "
                f"the {len(weight)} rows of {WEIGHT}"
            )

    def is_sequence_parallel(self, held: int, s: int, cp: int) -> bool:
        """Whether `held` positions are a block over tp of this rank's share of s, and not all of it."""
        local, tp = s // cp, self.group.size()
        if held == local:
            return False
        if local % tp == 0 and held == local // tp:
            return True
        cut = (
            f"{local} (replicated) or {local // tp} (sequence-parallel)"
            if local % tp == 0
            else f"{local} (replicated); {local} is no multiple of tp={tp}, so they cannot be sequence-parallel"
        )
        raise ValueError(
            f"{self.function}: {HIDDEN} has {held} positions; with s={s}, cp={cp}, tp={tp} it must have {cut}"
        )


def chunk_positions(hidden: Float[Tensor, "s b d"], width: int, chunk_size: int | None) -> int:
    """Positions of one chunk: `chunk_size`, or the largest power of two whose logits stay within the limit."""
    s, b = hidden.shape[:2]
    if chunk_size is None:
        rows = _limit(hidden.device) // (4 * max(width, 1))
        fitting = max(rows // max(b, 1), 1)
        chunk_size = max(1 << (fitting.bit_length() - 1), -(-FEWEST_ROWS // max(b, 1)))
    return max(min(chunk_size, s), 1)


def local_statistics(
    hidden: Float[Tensor, "s b d"], weight: Float[Tensor, "v d"], column: Int[Tensor, "n 1"], positions: int
) -> Float[Tensor, "3 n"]:
    """What this rank knows of each row: m_r, R_r and the target's logit."""
    found = torch.empty(3, len(column), dtype=accumulator(hidden.dtype), device=hidden.device)
    for part, rows in _chunks(hidden, positions):
        _put_statistics(found, rows @ weight.T, column, part)
    return found


def gradients(
    hidden: Float[Tensor, "s b d"],
    weight: Float[Tensor, "v d"],
    asked: Asked,
    whole: st.Normaliser,
    positions: int,
    wanted: tuple[bool, bool],
) -> tuple[Float[Tensor, "s b d"] | None, Float[Tensor, "v d"] | None]:
    """(this rank's term of d hidden, d weight), None where not wanted; of the same chunks as the forward."""
    of_hidden, of_weight = wanted
    d_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if of_hidden else None
    # A sum over chunks: kept in float32, so that many small chunks are as good as one.
    total = torch.zeros(weight.shape, dtype=accumulator(weight.dtype), device=weight.device) if of_weight else None
    for part, rows in _chunks(hidden, positions):
        d_logits = rows @ weight.T
        _turn_into_gradient(d_logits, asked, whole, part)
        if d_hidden is not None:
            torch.mm(d_logits, weight, out=d_hidden.view(-1, hidden.shape[-1])[part])
        if total is not None:
            _add_product(total, d_logits, rows)
        del d_logits  # before the next chunk's are made
    return d_hidden, None if total is None else total.to(weight.dtype)


# Functions of their own, so that no block outlives its chunk: two chunks of logits would be alive.
def _put_statistics(
    found: Float[Tensor, "3 n"], logits: Float[Tensor, "m v"], column: Int[Tensor, "n 1"], part: slice
) -> None:
    """Statistics of a chunk's rows."""
    local = chosen(st.local_statistics, PLAN, logits)
    for own, block in _blocks(logits, part):
        found[:, own] = local(block, column[own], 1.0, False)


def _turn_into_gradient(logits: Float[Tensor, "m v"], asked: Asked, whole: st.Normaliser, part: slice) -> None:
    """Logits of a chunk, overwritten by their gradient, which is rounded once."""
    write = chosen(write_gradient, PLAN, logits)
    for own, block in _blocks(logits, part):
        write(block, block, 1.0, True, asked.rows(own), whole.largest[own], whole.log_total[own], None, None)


def _add_product(total: Float[Tensor, "v d"], d_logits: Float[Tensor, "m v"], rows: Float[Tensor, "m d"]) -> None:
    """total += d_logits^T rows, the product in its own dtype and of bounded size."""
    if total.dtype == rows.dtype:
        total.addmm_(d_logits.T, rows)
        return
    step = max(1, _limit(total.device) // (4 * max(total.shape[1], 1)))
    for some, columns in zip(total.split(step), d_logits.split(step, dim=1), strict=True):
        some += columns.T @ rows


def _chunks(hidden: Float[Tensor, "s b d"], positions: int) -> Iterator[tuple[slice, Float[Tensor, "m d"]]]:
    """Rows of so many positions, each chunk with the slice of all rows that it is."""
    done = 0
    for chunk in hidden.split(positions):
        rows = chunk.reshape(-1, hidden.shape[-1])
        yield slice(done, done + len(rows)), rows
        done += len(rows)


def _blocks(logits: Float[Tensor, "m v"], part: slice) -> Iterator[tuple[slice, Float[Tensor, "n v"]]]:
    """Row blocks of a chunk's logits, each with the slice of all rows that it is."""
    for own, block in row_blocks(logits, rows_at_once(PLAN, logits)):
        yield slice(part.start + own.start, part.start + own.stop), block


def _limit(device: torch.device) -> int:
    return CHUNK_BYTES.get(device.type, CHUNK_BYTES_ELSEWHERE)


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
            positions = chunk_positions(states, len(weight), chunk_size)
            local = local_statistics(states, weight, column, positions)
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
            positions = chunk_positions(states, len(weight), ctx.chunk_size)
            asked = asked_of(column, grad_outputs[0].T.reshape(-1, 1))
            d_hidden, d_weight = gradients(
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
