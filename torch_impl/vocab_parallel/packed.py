"""Next-token log-probabilities for many sequences in one packed stream.

Sequences follow each other in the stream, and DualChunkSwap shards each sequence over cp by itself: cp rank r has its
share of sequence 0, then of sequence 1, ...; tp rank r has its columns. No score depends on another sequence.
`PackedSlots` has index arrays for the full batch: each token's sequence, its position, and whether a token follows it.
Their number does not depend on the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_gather
from torch_impl.contract import Group, PositiveInt, Rejected, Sharded, ShardedIds, ShardedInt, contract
from torch_impl.layouts import contiguous, packed
from torch_impl.layouts.divisibility import check_rising, first
from torch_impl.vocab_parallel.next_token import Scores, score, scoring_options, validate_entropy
from torch_impl.vocab_parallel.sampling import Sampling
from torch_impl.vocab_parallel.sequence_gather import rank_and_size, why_not_covered
from torch_impl.vocab_parallel.vocab_range import IGNORED_ID, ChunkSize, VocabEnd, VocabStart


@contract
def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Sharded[Tensor, "1 t/cp:packed v/tp"],
    target: ShardedIds[Tensor, "1 t"],
    cu_seqlens_padded: ShardedInt[Tensor, "n"],
    unpacked_seqlen: PositiveInt,
    vocab_start_index: VocabStart,
    vocab_end_index: VocabEnd,
    group: Group[ProcessGroup, "tp"],
    inference_only: bool = False,
    cp_group: Group[ProcessGroup, "cp"] | None = None,
    chunk_size: ChunkSize | None = None,
    sampling_params: Sampling | None = None,
    target_is_pre_rolled: bool = False,
    cu_seqlens: ShardedInt[Tensor, "n"] | None = None,
    with_entropy: bool = False,
) -> Sharded[Tensor, "b u tp=I cp=R"] | tuple[Sharded[Tensor, "b u tp=I cp=R"], Sharded[Tensor, "b u tp=I cp=R"]]:
    """Log-probability of each next token inside its own sequence, one row per sequence.

    out[i, j] = log p(id[j + 1] | logits[j]) in sequence i;   u = unpacked_seqlen - 1

    The l = t/cp tokens of `vocab_parallel_logits` on each rank are in the layout `packed`. Row i is 0.0 from the
    sequence's last position on, and truncated at u. `cu_seqlens_padded` [b + 1] are offsets into the full stream;
    tokens past the last offset are padding. Positions between a sequence's real and its padded end score their padding
    ids; `cu_seqlens` (real lengths) makes them 0.0 without gradient. With `target_is_pre_rolled` the target is shifted
    inside each sequence and sharded like the logits, "1 t/cp:packed". `with_entropy` returns the pair
    (log-probability, sum p log p of its position), both 0.0 at positions without a next token.
    Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp
    or use each score in the loss of one rank alone.

    Cost:   forward 1 all_gather of 3 * t/cp numbers over tp (more with a filter) and 1 all_gather of t/cp numbers over
            cp; backward none over tp, 1 reduce_scatter of t numbers over cp. With entropy 4 numbers for 3 over tp, and
            twice as many over cp. No cost depends on b. One host read of the offsets, none if they are on the host.
            Saves as `from_parallel_logits_to_logprobs`, and 8 bytes per token.
    Errors: as `from_parallel_logits_to_logprobs`; ValueError if offsets do not ascend from 0, a padded length is not a
            multiple of 2 * cp over two ranks or more, the last offset is past the stream or the ids, a real length
            exceeds its padded one, or unpacked_seqlen is below 1.
    """
    validate_entropy(with_entropy, sampling_params)
    # 1. Checks that a contract cannot state: lengths, and the offsets, which the host reads once.
    rank, cp = rank_and_size(cp_group)
    local, device = vocab_parallel_logits.shape[1], vocab_parallel_logits.device
    size = target.shape[1] * cp if target_is_pre_rolled else target.shape[1]
    if target.shape[1] > local * (1 if target_is_pre_rolled else cp):
        shards = 1 if target_is_pre_rolled else cp
        raise Rejected(f"{why_not_covered('target', target.shape[1], 'vocab_parallel_logits', local, shards)}")
    padded, real = offsets_on_host(cu_seqlens_padded, cu_seqlens)
    reason = why_not_offsets(padded, real, cp, size, "target")
    if reason:
        raise Rejected(reason)
    # 2. The id after each token of this rank in its sequence, and the score.
    slots, u = packed_slots(padded, real, cp, device), unpacked_seqlen - 1
    ids, used = target.to(device), len(slots.sequence)
    target = slots.ignore_last(ids[:, :used], rank) if target_is_pre_rolled else slots.next_ids(ids, rank)
    options, limits = scoring_options(
        group, vocab_start_index, vocab_end_index, chunk_size, sampling_params, inference_only, with_entropy
    )
    scores = score(vocab_parallel_logits, F.pad(target, (0, local - used), value=IGNORED_ID), options, limits)
    # 3. Spread the scores into one row per sequence.
    cells = (len(padded) - 1) * u
    cell = torch.where(slots.index_in_sequence < u, slots.sequence * u + slots.index_in_sequence, cells)
    rows = slots.spread_apart(scores, cell, cells, cp_group, with_entropy)
    shape = len(padded) - 1, u
    return (rows[0].view(shape), rows[1].view(shape)) if isinstance(rows, tuple) else rows.view(shape)


@dataclass(frozen=True)
class PackedSlots:
    """The tokens in local slots: slot i of cp rank r holds token index_in_sequence[r, i] of sequence[i].

    That token is at position[r, i] of the stream, and has_next[r, i] tells whether its sequence continues.
    """

    sequence: Int64[Tensor, " l"]
    position: Int64[Tensor, "cp l"]
    index_in_sequence: Int64[Tensor, "cp l"]
    has_next: Bool[Tensor, "cp l"]

    def next_ids(self, ids: Int[Tensor, "b t"], rank: int) -> Int[Tensor, "b l"]:
        """The id after each token of one rank, inside its sequence; IGNORED_ID if no token follows."""
        # If no token follows, any valid index will do: `ignore_last` overwrites its id.
        after = torch.where(self.has_next[rank], self.position[rank] + 1, 0)
        return self.ignore_last(ids[:, after], rank)

    def ignore_last(self, target: Int[Tensor, "b l"], rank: int) -> Int[Tensor, "b l"]:
        """The targets of one rank's slots, with IGNORED_ID if no token follows."""
        return target.masked_fill(~self.has_next[rank], IGNORED_ID)

    def spread(
        self, scores: Float[Tensor, "b m"], to: Int64[Tensor, "cp l"], size: int, cp_group: ProcessGroup | None
    ) -> Float[Tensor, "b size"]:
        """Gather scores over cp and write them at the indices `to`; 0 elsewhere. Indices from `size` on are dropped.

        "b t/cp:packed" -> "b size cp=R". Slots past the last sequence are padding.
        """
        cp, used = self.position.shape
        if cp_group is not None:
            scores = all_gather(scores, cp_group, out="R", dim=1)
        # One extra column receives the dropped scores, so that shapes do not depend on the data.
        flat = scores.view(len(scores), cp, -1)[:, :, :used].flatten(1)
        index = torch.where(self.has_next, to, size).clamp_max(size).flatten()
        return flat.new_zeros(len(flat), size + 1).index_copy(1, index, flat)[:, :size]

    def spread_apart(
        self,
        scores: Float[Tensor, "b m *two"],
        to: Int64[Tensor, "cp l"],
        size: int,
        cp_group: ProcessGroup | None,
        with_entropy: bool,
    ) -> Scores:
        """`spread` of scores, or of pairs (score, entropy) in their last dim, in one message."""
        if not with_entropy:
            return self.spread(scores, to, size, cp_group)
        both = self.spread(scores.movedim(-1, 0).flatten(0, 1), to, size, cp_group)
        return both[: len(scores)], both[len(scores) :]


def packed_slots(
    padded: Int64[Tensor, " n"], real: Int64[Tensor, " n"] | None, cp: int, device: torch.device
) -> PackedSlots:
    """The slots for validated offsets on the host; with `real` offsets, no token follows a sequence's last real one."""
    total, offsets = int(padded[-1]), padded.to(device)
    lengths = offsets.diff()
    ends = lengths if real is None else real.to(device).diff()
    # Without cp, lengths may be anything, and `packed` would require multiples of 2 * cp.
    positions = packed(total, cp, padded, device=device) if cp > 1 else contiguous(total, 1, device=device)
    position = torch.stack(positions)
    each = torch.arange(len(lengths), device=device)
    sequence = each.repeat_interleave(lengths // cp, output_size=total // cp)
    index = position - offsets[sequence]
    return PackedSlots(sequence, position, index, index + 1 < ends[sequence])


def offsets_on_host(padded: Tensor, real: Tensor | None) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"] | None]:
    """Both offsets on the host, as int64, in one read."""
    if real is None:
        return padded.long().cpu(), None
    both = torch.stack([padded.long(), real.long().to(padded.device)]).cpu()
    return both[0], both[1]


def why_not_offsets(
    padded: Int64[Tensor, " n"], real: Int64[Tensor, " n"] | None, cp: int, covered: int, by: str
) -> str | None:
    """Why offsets do not describe a packed stream, or None; the argument `by` covers `covered` positions."""
    for name, offsets in (("cu_seqlens_padded", padded), ("cu_seqlens", real)):
        if offsets is not None and not len(offsets):
            return f"{name} is [0]; offsets are one row of [batch + 1]"
        if offsets is not None:
            try:
                check_rising(name, offsets)
            except ValueError as error:
                return str(error)
    lengths = padded.diff()
    for j in first(lengths % (2 * cp) != 0 if cp > 1 else lengths < 0):
        length = int(lengths[j])
        return (
            f"cu_seqlens_padded[{j + 1}] - cu_seqlens_padded[{j}] = {length} is not a multiple of "
            f"2*cp = {2 * cp}; pad sequence {j} to {length + -length % (2 * cp)}"
        )
    real_lengths = lengths if real is None else real.diff()
    for j in first(real_lengths > lengths):
        tokens, slot = int(real_lengths[j]), int(lengths[j])
        return f"cu_seqlens has {tokens} tokens for sequence {j} but its padded slot has {slot}"
    if padded[-1] > covered:
        return f"cu_seqlens_padded ends at {int(padded[-1])} but {by} covers {covered}"
    return None
