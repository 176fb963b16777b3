"""Next-token log-probabilities under NeMo-RL's names, for logits sharded over tp and cp, plain or as DTensors.

Ids are unshifted: position t is scored against id t + 1, and the last position is dropped. Each function validates its
arguments and calls the core in `next_token`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import Group, Rejected, Sharded, ShardedIds, ShardedInt, contract
from torch_impl.vocab_parallel.next_token import (
    score_dtensor,
    score_in_stored_order,
    score_over_cp,
    scoring_options,
    stored_ids,
    validate_entropy,
    validate_shards,
    why_not_dtensors,
    why_not_stored,
)
from torch_impl.vocab_parallel.sampling import Sampling
from torch_impl.vocab_parallel.sequence_gather import rank_and_size, why_not_covered
from torch_impl.vocab_parallel.vocab_range import ChunkSize, VocabEnd, VocabStart

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@contract
def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Sharded[Tensor, "b l/cp:dual_chunk_swap v/tp"],
    target: ShardedIds[Tensor, "b s"],
    vocab_start_index: VocabStart,
    vocab_end_index: VocabEnd,
    tp_group: Group[ProcessGroup, "tp"],
    inference_only: bool = False,
    cp_group: Group[ProcessGroup, "cp"] | None = None,
    chunk_size: ChunkSize | None = None,
    sampling_params: Sampling | None = None,
    with_entropy: bool = False,
) -> Sharded[Tensor, "b u tp=I cp=R"] | tuple[Sharded[Tensor, "b u tp=I cp=R"], Sharded[Tensor, "b u tp=I cp=R"]]:
    """Log-probability of each next token; positions sharded over cp, `target` replicated and unshifted.

    out[b, t] = log p(target[b, t + 1] | vocab_parallel_logits[b, t]),   t < u = s - 1

    The l = s/cp positions of the logits on each rank are in DualChunkSwap order; the logits may cover more than s.
    `sampling_params` scales and filters the logits as `TrainingSamplingParams` describes. With `with_entropy` the
    result is a pair (log-probability, sum p log p of its position), without another read of the logits; the entropy
    covers the full vocabulary, at the sampling temperature.
    Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp
    or use each score in the loss of one rank alone.

    Cost:   forward 1 all_gather of 3 * b*s/cp numbers over tp (more with a filter) and 1 all_gather of b*s/cp numbers
            over cp; backward none over tp, 1 reduce_scatter of b*s numbers over cp. With entropy 4 numbers instead of
            3 over tp, and twice as many over cp. Saves as `vocab_parallel_logprob`, or with a filter as
            `DistributedLogprobWithSampling`.
    Errors: TypeError for a group that is not a ProcessGroup, ids that are not int32 or int64, logits not floating;
            ValueError if shapes disagree, target covers more positions than the logits, s cannot be sharded over cp,
            the range, chunk_size or sampling parameters are out of range, or with_entropy is combined with a filter.
    """
    validate_entropy(with_entropy, sampling_params)
    local, cp = vocab_parallel_logits.shape[1], rank_and_size(cp_group)[1]
    reason = why_not_covered("target", target.shape[1], "vocab_parallel_logits", local, cp)
    if reason:
        raise Rejected(reason)
    options, limits = scoring_options(
        tp_group, vocab_start_index, vocab_end_index, chunk_size, sampling_params, inference_only, with_entropy
    )
    return score_over_cp(vocab_parallel_logits, target, cp_group, options, limits)


@contract
def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Sharded[Tensor, "b l/cp v/tp"],
    target: ShardedIds[Tensor, "b s/cp"] | DTensor,
    vocab_start_index: VocabStart,
    vocab_end_index: VocabEnd,
    tp_group: Group[ProcessGroup, "tp"],
    inference_only: bool = False,
    seq_index: ShardedInt[Tensor, "n"] | None = None,
    chunk_size: ChunkSize | None = None,
    sampling_params: Sampling | None = None,
    with_entropy: bool = False,
) -> Sharded[Tensor, "b u tp=I cp=I"] | tuple[Sharded[Tensor, "b u tp=I cp=I"], Sharded[Tensor, "b u tp=I cp=I"]]:
    """Log-probability of each next token, from local `vocab_parallel_logits` and a `target` that may be a DTensor.

    The target's mesh may have a dim `cp` that shards the s positions of logits and target in stored order: stored
    position j is original position `seq_index[j]`. Without such a mesh dim, or if it replicates target and logits and
    there is no `seq_index`, each rank has all positions in order. The result is a plain tensor of u = s - 1 scores in
    original order. Every cp rank passes the same cotangent, and the gradient needs no factor.

    Cost:   over tp as `from_parallel_logits_to_logprobs`; over cp forward 1 all_gather of b*s/cp ids and 1 all_gather
            of b*s/cp scores, with entropy twice as many scores; backward none. One host read, of seq_index. Saves as
            `from_parallel_logits_to_logprobs`.
    Errors: as `from_parallel_logits_to_logprobs`; ValueError if seq_index is missing for a sharded target, is given
            without a mesh dim cp or is not a permutation, or if another mesh dim shards the sequence.
    """
    validate_entropy(with_entropy, sampling_params)
    validate_shards("vocab_parallel_logits", vocab_parallel_logits, "target", target)
    reason = why_not_stored("vocab_parallel_logits", vocab_parallel_logits.shape[1], "target", target, seq_index)
    if reason:
        raise Rejected(reason)
    # `stored_ids` brings a plain target and a DTensor to one form.
    options, limits = scoring_options(
        tp_group, vocab_start_index, vocab_end_index, chunk_size, sampling_params, inference_only, with_entropy
    )
    return score_in_stored_order(vocab_parallel_logits, stored_ids(target), seq_index, options, limits)


@contract
def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: ShardedIds[Tensor, "b s/cp"] | DTensor,
    seq_index: ShardedInt[Tensor, "n"] | None = None,
    chunk_size: ChunkSize | None = None,
    sampling_params: Sampling | None = None,
    with_entropy: bool = False,
) -> Sharded[Tensor, "b u tp=I cp=I"] | tuple[Sharded[Tensor, "b u tp=I cp=I"], Sharded[Tensor, "b u tp=I cp=I"]]:
    """Log-probability of each next token, from DTensor logits that are Shard(-1) over the mesh dim `tp`.

    `vocab_parallel_logits` are a DTensor of shape [b, s, v]; a mesh dim `cp` may shard s. The range of each rank
    follows DTensor's ceil rule, empty shards included; the gradient is a DTensor with the logits' placements. With
    grad disabled nothing is saved. All else is as in `dtensor_from_parallel_logits_to_logprobs`.

    Cost:   as `dtensor_from_parallel_logits_to_logprobs`.
    Errors: as `dtensor_from_parallel_logits_to_logprobs`; TypeError for logits that are not a DTensor; ValueError
            without a mesh dim `tp`, for a vocabulary that is not sharded over it, or for plain ids with logits that
            cp shards.
    """
    from torch.distributed.tensor import DTensor

    logits = vocab_parallel_logits
    validate_entropy(with_entropy, sampling_params)
    # A contract does not validate DTensor annotations, which are imported for type checkers only.
    if not isinstance(logits, DTensor):
        kind = type(logits).__name__
        raise Rejected(f"vocab_parallel_logits is a {kind}; pass a DTensor with a mesh dim 'tp'", TypeError)
    validate_shards("vocab_parallel_logits", logits.to_local(), "input_ids", input_ids)
    reason = why_not_dtensors("vocab_parallel_logits", logits, input_ids, seq_index)
    if reason:
        raise Rejected(reason)
    return score_dtensor(logits, input_ids, seq_index, chunk_size, sampling_params, with_entropy)
