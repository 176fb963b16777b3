"""Log-probabilities of next tokens of many sequences in one packed stream.

Rank r of cp holds its DualChunkSwap share of sequence 0, then of sequence 1, ...; rank r of tp its columns.
Two sequences never see each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_gather
from torch_impl.layouts import contiguous, packed
from torch_impl.layouts.divisibility import check_rising, first
from torch_impl.vocab_parallel.next_token import Scoring
from torch_impl.vocab_parallel.sampling import SamplingParams
from torch_impl.vocab_parallel.sequence_gather import checked_cp_group
from torch_impl.vocab_parallel.vocab_range import NO_ID


@dataclass(frozen=True)
class PackedSlots:
    """Local slot i of cp rank r holds token place[r, i] of sequence[i], which is position[r, i] of the stream."""

    sequence: Int64[Tensor, " l"]
    position: Int64[Tensor, "cp l"]
    place: Int64[Tensor, "cp l"]
    has_next: Bool[Tensor, "cp l"]

    def next_ids(self, ids: Int[Tensor, "b t"], rank: int) -> Int[Tensor, "b l"]:
        """The id after each token of one rank, in its own sequence; nobody's where there is none."""
        after = torch.where(self.has_next[rank], self.position[rank] + 1, 0)
        return self.asked(ids[:, after], rank)

    def asked(self, target: Int[Tensor, "b l"], rank: int) -> Int[Tensor, "b l"]:
        """Targets of one rank's slots, nobody's where the token has no next."""
        return target.masked_fill(~self.has_next[rank], NO_ID)

    def spread(
        self, scores: Float[Tensor, "b m"], to: Int64[Tensor, "cp l"], size: int, cp_group: ProcessGroup | None
    ) -> Float[Tensor, "b size"]:
        """Scores of all ranks at the places `to` of `size`, 0 elsewhere; places from `size` on are dropped.

        "b t/cp:packed" -> "b size cp=R". Slots past the last sequence are padding.
        """
        cp, used = self.position.shape
        if cp_group is not None:
            scores = all_gather(scores, cp_group, out="R", dim=1)
        flat = scores.view(len(scores), cp, -1)[:, :, :used].flatten(1)
        index = torch.where(self.has_next, to, size).clamp_max(size).flatten()
        return flat.new_zeros(len(flat), size + 1).index_copy(1, index, flat)[:, :size]


def packed_slots(
    padded: Int64[Tensor, " n"], true: Int64[Tensor, " n"] | None, cp: int, device: torch.device
) -> PackedSlots:
    """Slots for offsets on the host that `checked_offsets` has let pass; with true ones padding has no next."""
    total, offsets = int(padded[-1]), padded.to(device)
    lengths = offsets.diff()
    ends = lengths if true is None else true.to(device).diff()
    held = packed(total, cp, padded, device=device) if cp > 1 else contiguous(total, 1, device=device)
    position = torch.stack(held)
    each = torch.arange(len(lengths), device=device)
    sequence = each.repeat_interleave(lengths // cp, output_size=total // cp)
    place = position - offsets[sequence]
    return PackedSlots(sequence, position, place, place + 1 < ends[sequence])


def checked_offsets(
    function: str, padded: Tensor, true: Tensor | None, cp: int, covered: int, by: str
) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"] | None]:
    """Both offsets on the host, as int64, by one read; `covered` positions are what `by` has."""
    given = {"cu_seqlens_padded": padded} if true is None else {"cu_seqlens_padded": padded, "cu_seqlens": true}
    for name, offsets in given.items():
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{function}: {name} is {str(offsets.dtype).removeprefix('torch.')}; offsets are integers")
        if offsets.ndim != 1 or not len(offsets) or len(offsets) != len(padded):
            raise ValueError(
                f"{function}: {name} is {list(offsets.shape)}; offsets are one row of [batch + 1], as many in each"
            )
    on_host = torch.stack([offsets.long().to(padded.device) for offsets in given.values()]).cpu()
    for name, offsets in zip(given, on_host, strict=True):
        check_rising(f"{function}: {name}", offsets)
    lengths = on_host.diff()
    for j in first(lengths[0] % (2 * cp) != 0 if cp > 1 else lengths[0] < 0):
        length = int(lengths[0, j])
        raise ValueError(
            f"{function}: cu_seqlens_padded[{j + 1}] - cu_seqlens_padded[{j}] = {length} is not a multiple of "
            f"2*cp = {2 * cp}; pad sequence {j} to {length + -length % (2 * cp)}"
        )
    for j in first(lengths[-1] > lengths[0]):
        raise ValueError(
            f"{function}: cu_seqlens gives sequence {j} {int(lengths[-1, j])} tokens "
            f"but its padded slot has {int(lengths[0, j])}"
        )
    if on_host[0, -1] > covered:
        raise ValueError(f"{function}: cu_seqlens_padded ends at {int(on_host[0, -1])} but {by} covers {covered}")
    return on_host[0], None if true is None else on_host[1]


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Float[Tensor, "1 l v"],
    target: Int[Tensor, "1 t"],
    cu_seqlens_padded: Int[Tensor, " n"],
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: SamplingParams | None = None,
    target_is_pre_rolled: bool = False,
    cu_seqlens: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, "b u"]:
    """Log-probability of each next token inside its own sequence, one row for each sequence.

        vocab_parallel_logits  "1 t/cp:packed v/tp"     target  "1 t"     ->   "b u tp=I cp=R"

    out[i, j] = log p(id[j + 1] | logits[j]) of sequence i;   u = unpacked_seqlen - 1

    Row i is 0.0 from its last position on and cut off at u. `cu_seqlens_padded` [b + 1] are offsets into the
    uncut stream; tokens past the last are padding. Between a sequence's true and padded end stand scores of
    padding ids, with `cu_seqlens` (true lengths) 0.0 without gradient. With `target_is_pre_rolled` the target is
    "1 t/cp:packed", shifted inside each sequence and cut.
    Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp
    or let each rank own a share.

    Cost:   forward that of the core (1 all_gather of 3 * t/cp numbers over tp; more with a filter) and
            1 all_gather of t/cp numbers over cp; backward none over tp, 1 reduce_scatter of t numbers over cp.
            None depends on b. One host read of the offsets, none if they are on the host. Saves what the
            core does and 8 bytes per token.
    Errors: as `from_parallel_logits_to_logprobs`; besides ValueError if offsets do not ascend from 0, a padded
            length is no multiple of 2 * cp over two ranks or more, the last lies past the stream or the ids,
            a true length is longer than its slot, or unpacked_seqlen is below 1.
    """
    function = "vocab_parallel.from_parallel_logits_to_logprobs_packed_sequences"
    scoring = Scoring(
        function,
        group,
        vocab_start_index,
        vocab_end_index,
        inference_only=inference_only,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
        group_name="group",
    )
    cp = 1 if cp_group is None else checked_cp_group(function, cp_group).size()
    rank = 0 if cp_group is None else cp_group.rank()
    _check(scoring, vocab_parallel_logits, target, unpacked_seqlen, cp, target_is_pre_rolled)
    local, device = vocab_parallel_logits.shape[1], vocab_parallel_logits.device
    known = target.shape[1] * cp if target_is_pre_rolled else target.shape[1]
    padded, true = checked_offsets(function, cu_seqlens_padded, cu_seqlens, cp, known, "target")
    slots, u = packed_slots(padded, true, cp, device), unpacked_seqlen - 1
    ids, used = target.to(device), len(slots.sequence)
    own = slots.asked(ids[:, :used], rank) if target_is_pre_rolled else slots.next_ids(ids, rank)
    scores = scoring.scores(vocab_parallel_logits, F.pad(own, (0, local - used), value=NO_ID))
    cells = (len(padded) - 1) * u
    cell = torch.where(slots.place < u, slots.sequence * u + slots.place, cells)
    return slots.spread(scores, cell, cells, cp_group).view(len(padded) - 1, u)


def _check(
    scoring: Scoring, logits: Tensor, target: Tensor, unpacked_seqlen: int, cp: int, target_is_pre_rolled: bool
) -> None:
    """One stream of logits, no longer one of ids, and rows of at least one token."""
    scoring.check(logits, target)
    if len(logits) != 1:
        raise ValueError(f"{scoring.function}: {scoring.logits_name} is {list(logits.shape)}; a stream is [1, t, v]")
    scoring.check_length(target.shape[1], logits.shape[1], 1 if target_is_pre_rolled else cp)
    if unpacked_seqlen < 1:
        raise ValueError(f"{scoring.function}: unpacked_seqlen={unpacked_seqlen} must be at least 1")
