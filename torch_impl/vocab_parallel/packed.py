"""Log-probabilities of next tokens of many sequences in one packed stream.

Rank r of cp holds its DualChunkSwap share of sequence 0, then of sequence 1, ...; rank r of tp its columns.
Two sequences never see each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel.packed_slots import checked_offsets, packed_slots
from torch_impl.vocab_parallel.sampling_params import SamplingParams
from torch_impl.vocab_parallel.scoring import Scoring
from torch_impl.vocab_parallel.sequence_gather import checked_cp_group
from torch_impl.vocab_parallel.vocab_range import NO_ID


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
