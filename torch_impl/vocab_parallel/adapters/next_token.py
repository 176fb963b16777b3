"""Log-probabilities of next tokens, from logits cut over tp and over cp.

Ids come unshifted: position t is scored against id t + 1, and the last position is dropped. Logits may cover
more positions than there are ids. An id that nobody owns scores 0.0 and has no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel.next_token import (
    Scoring,
    scored_in_stored_order,
    scored_over_cp,
    stored_ids,
)
from torch_impl.vocab_parallel.sampling import SamplingParams

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Float[Tensor, "b l v"],
    target: Int[Tensor, "b s"],
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    cp_group: ProcessGroup | None = None,
    chunk_size: int | None = None,
    sampling_params: SamplingParams | None = None,
) -> Float[Tensor, "b u"]:
    """Log-probability of each next token; positions cut over cp by DualChunkSwap, `target` whole and unshifted.

        vocab_parallel_logits  "b s/cp:dual_chunk_swap v/tp"     target  "b s"     ->   "b u tp=I cp=R",   u = s - 1

    out[b, t] = log p(target[b, t + 1] | logits[b, t])

    `sampling_params` scales and filters as `TrainingSamplingParams` says; `chunk_size` bounds the working set.
    Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp
    or let each rank own a share.

    Cost:   forward that of the core (1 all_gather of 3 * b*s/cp numbers over tp; more with a filter) and
            1 all_gather of b*s/cp numbers over cp; backward none over tp, 1 reduce_scatter of b*s numbers over cp.
            Saves what the core does.
    Errors: TypeError for a group that is none, ids that are no integers, logits not floating; ValueError if
            shapes disagree, target covers more positions than the logits, s cannot be cut over cp, or the
            range, chunk_size or sampling parameters are out of range.
    """
    scoring = Scoring(
        "vocab_parallel.from_parallel_logits_to_logprobs",
        tp_group,
        vocab_start_index,
        vocab_end_index,
        inference_only=inference_only,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )
    return scored_over_cp(scoring, vocab_parallel_logits, target, cp_group)


def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Float[Tensor, "b l v"],
    target: DTensor | Int[Tensor, "b s"],
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: ProcessGroup,
    inference_only: bool = False,
    seq_index: Int[Tensor, " s"] | None = None,
    chunk_size: int | None = None,
    sampling_params: SamplingParams | None = None,
) -> Float[Tensor, "b u"]:
    """Log-probability of each next token, of local logits and a target that may be a DTensor.

        vocab_parallel_logits  "b s/cp v/tp"     target  "b s/cp"     ->   "b u tp=I cp=I",   u = s - 1

    cp is the mesh dim of that name of target's mesh, and s is in stored order: stored position j is original
    position `seq_index[j]`. Without such a mesh dim s is whole and in order. The result is a plain tensor in
    original order. Every cp rank passes the same cotangent, with factor 1.

    Cost:   forward that of the core; over cp 1 all_gather of b*s/cp ids and 1 of b*s/cp scores; backward
            none. One host read, of seq_index. Saves what the core does.
    Errors: as `from_parallel_logits_to_logprobs`; ValueError if seq_index is missing for a cut target, given
            for one without cp or no permutation, or another mesh dim cuts the sequence.
    """
    function = "vocab_parallel.dtensor_from_parallel_logits_to_logprobs"
    scoring = Scoring(
        function,
        tp_group,
        vocab_start_index,
        vocab_end_index,
        inference_only=inference_only,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )
    ids = stored_ids(function, "target", target)
    return scored_in_stored_order(scoring, vocab_parallel_logits, ids, seq_index)


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Int[Tensor, "b s"] | DTensor,
    seq_index: Int[Tensor, " s"] | None = None,
    chunk_size: int | None = None,
    sampling_params: SamplingParams | None = None,
) -> Float[Tensor, "b u"]:
    """Log-probability of each next token, of logits that are a DTensor cut by Shard(-1) over the mesh dim `tp`.

        vocab_parallel_logits  "b s/cp v/tp"     input_ids  "b s/cp"     ->   "b u tp=I cp=I",   u = s - 1

    The range of each rank follows DTensor's ceil rule, empty shards included; the gradient is a DTensor with
    the logits' placements. With grad disabled nothing is saved. All else, cost and errors too, is as in
    `dtensor_from_parallel_logits_to_logprobs`.

    Errors: besides, TypeError for logits that are no DTensor; ValueError without a mesh dim `tp`, with the
            vocabulary not cut over it, or with plain ids for logits that cp cuts.
    """
    return _of_dtensor(
        "vocab_parallel.get_logprobs_from_vocab_parallel_logits",
        "vocab_parallel_logits",
        vocab_parallel_logits,
        input_ids,
        seq_index,
        chunk_size,
        sampling_params,
    )
