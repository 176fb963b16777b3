"""Next-token log-probabilities, from logits sharded over tp and over cp.

Ids are unshifted: position t is scored against id t + 1, and the last position is dropped. Logits may cover more
positions than there are ids; the extra positions are scored against IGNORED_ID. An id outside the vocabulary scores 0.0
and has no gradient.

    get_next_token_logprobs_from_logits     the function to call: validates, and takes one of the two routes below
    score_over_cp                           positions sharded over cp by DualChunkSwap, ids replicated
    score_in_stored_order                   positions and ids in another order, sharded over cp, as in a DTensor
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_gather
from torch_impl.collectives.plain import all_gather_concat
from torch_impl.contract import Group, Rejected, Sharded, ShardedIds, ShardedInt, check, contract
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.contract.tensor_kinds import TensorKind
from torch_impl.layouts import indivisible
from torch_impl.layouts.index_arrays import inverse_permutation
from torch_impl.vocab_parallel import sampling
from torch_impl.vocab_parallel.filter_bounds import Limits, limits_of
from torch_impl.vocab_parallel.fused_logprob import FusedLogprob, LogprobOptions
from torch_impl.vocab_parallel.sampling import Sampling, SamplingParams, min_p_of
from torch_impl.vocab_parallel.sequence_gather import GatherOverCp, cp_shard, rank_and_size, why_not_covered
from torch_impl.vocab_parallel.vocab_range import (
    IGNORED_ID,
    ChunkSize,
    all_gather_range_and_size,
    dtensor_range,
    why_not_rank,
    why_not_sharded_by,
    why_not_sharded_over_tp,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@contract
def get_next_token_logprobs_from_logits(
    input_ids: ShardedIds[Tensor, "b s"] | DTensor,
    next_token_logits: Sharded[Tensor, "b l/cp:dual_chunk_swap v/tp"] | DTensor,
    seq_index: ShardedInt[Tensor, "n"] | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Group[ProcessGroup, "tp"] | None = None,
    context_parallel_group: Group[ProcessGroup, "cp"] | None = None,
    sampling_params: Sampling | None = None,
    chunk_size: ChunkSize | None = None,
    with_entropy: bool = False,
) -> Sharded[Tensor, "b u tp=I cp=R"] | tuple[Sharded[Tensor, "b u tp=I cp=R"], Sharded[Tensor, "b u tp=I cp=R"]]:
    """Log-probability of each next token; logits are sharded over a group, or a DTensor, or have the full vocabulary.

        a group   "b s/cp:dual_chunk_swap v/tp", "b s"   ->   "b u tp=I cp=R",   u = s - 1
        DTensor   "b s/cp v/tp", "b s/cp"                ->   "b u tp=I cp=I"
        neither   "b s/cp:dual_chunk_swap v", "b s"      ->   "b u cp=R"

    `next_token_logits` are never copied to another dtype, ids move to their device, and shards may differ in width.
    With `cp=R` cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by
    cp or use each score in the loss of one rank alone. `with_entropy` returns a pair: the scores, and sum p log p of
    each position, over the full vocabulary at the sampling temperature.

    Cost:   as `from_parallel_logits_to_logprobs`, for a DTensor as `dtensor_from_parallel_logits_to_logprobs`; with a
            vocabulary group also 1 all_gather of one int64 over tp and one host read.
    Errors: as the function named under Cost; ValueError for a missing or wrong rank, seq_index without DTensor logits,
            DTensor logits together with a group, or with_entropy together with a filter.
    """
    from torch.distributed.tensor import DTensor

    validate_entropy(with_entropy, sampling_params)
    # 1. DTensor logits bring their groups and ranges.
    if isinstance(next_token_logits, DTensor):
        for name, group in (
            ("vocab_parallel_group", vocab_parallel_group),
            ("context_parallel_group", context_parallel_group),
        ):
            if group is not None:
                raise Rejected(f"next_token_logits is a DTensor, whose mesh has the groups; drop {name}")
        validate_shards("next_token_logits", next_token_logits.to_local(), "input_ids", input_ids)
        reason = why_not_dtensors("next_token_logits", next_token_logits, input_ids, seq_index)
        if reason:
            raise Rejected(reason)
        return score_dtensor(next_token_logits, input_ids, seq_index, chunk_size, sampling_params, with_entropy)
    # 2. Otherwise one all_gather over the group gives the ranges; without a group each rank has the full vocabulary.
    check(TensorKind("b s", "ids"), "input_ids", input_ids)  # a plain tensor, like the logits
    cp, local = rank_and_size(context_parallel_group)[1], next_token_logits.shape[1]
    reason = why_not_rank(vocab_parallel_rank, vocab_parallel_group)
    if seq_index is not None:
        reason = "seq_index is given but next_token_logits is not a DTensor; drop it or pass a DTensor"
    reason = reason or why_not_covered("input_ids", input_ids.shape[1], "next_token_logits", local, cp)
    if reason:
        raise Rejected(reason)
    start, end = 0, next_token_logits.shape[-1]
    if vocab_parallel_group is not None:
        start, end, _ = all_gather_range_and_size(end, vocab_parallel_group, next_token_logits.device)
    options, limits = scoring_options(
        vocab_parallel_group, start, end, chunk_size, sampling_params, with_entropy=with_entropy
    )
    return score_over_cp(next_token_logits, input_ids, context_parallel_group, options, limits)


def validate_entropy(with_entropy: bool, params: SamplingParams | None) -> None:
    """Reject an entropy beside a filter, since the entropy covers the full vocabulary. Errors: ValueError."""
    if with_entropy and params is not None and not limits_of(params.top_k, params.top_p, min_p_of(params)).are_off:
        raise Rejected(
            f"with_entropy=True but top_k={params.top_k}, top_p={params.top_p}, min_p={min_p_of(params)} "
            "filter the vocabulary; "
            "ask for the entropy in a call without a filter"
        )


def scoring_options(
    group: ProcessGroup | None,
    start: int,
    end: int,
    chunk_size: int | None,
    params: SamplingParams | None,
    inference_only: bool = False,
    with_entropy: bool = False,
) -> tuple[LogprobOptions, Limits]:
    """The core's options and filter limits, from the arguments of a public function."""
    options = LogprobOptions(
        group, start, end, chunk_size=chunk_size, inference_only=inference_only, with_entropy=with_entropy
    )
    if params is None:
        return options, Limits(None, None)
    limits = limits_of(params.top_k, params.top_p, min_p_of(params))
    return options._replace(temperature=float(params.temperature)), limits


Scores = Tensor | tuple[Tensor, Tensor]


def score_over_cp(
    logits: Float[Tensor, "b l v"],
    ids: Int[Tensor, "b s"],
    cp_group: ProcessGroup | None,
    options: LogprobOptions,
    limits: Limits,
) -> Scores:
    """Next-token scores, positions sharded over cp by DualChunkSwap: "b s/cp:dual_chunk_swap v/tp" -> "b u cp=R"."""
    # Shift before sharding: the id after the last position of a chunk is usually on another rank.
    rank, cp = rank_and_size(cp_group)
    target = cp_shard(next_ids(ids.to(logits.device), logits.shape[1] * cp), rank, cp)
    scores = score(logits, target, options, limits)
    if cp_group is not None:
        scores = GatherOverCp.apply(scores, cp_group, 1)
    return apart(scores[:, : max(ids.shape[1] - 1, 0)], options.with_entropy)


def next_ids(ids: Int[Tensor, "b s"], size: int) -> Int[Tensor, "b size"]:
    """Id t + 1 at position t, for `size` positions; IGNORED_ID at the last position and past the ids."""
    after = ids[:, 1:]
    return F.pad(after, (0, size - after.shape[1]), value=IGNORED_ID)


def score(
    logits: Float[Tensor, "b s v"], target: Int[Tensor, "b s"], options: LogprobOptions, limits: Limits
) -> Float[Tensor, "b s *two"]:
    """log p of already shifted targets, on this rank's positions; with entropy both in a last dim of 2."""
    # Without a filter one read of the logits is enough; with a filter, an earlier read selects the logits that count.
    if not limits.are_off:
        return FilteredLogprob.apply(logits, target, options, limits)
    outputs = FusedLogprob.apply(logits, target, options)
    return torch.stack(outputs, -1) if options.with_entropy else outputs[0]


def apart(scores: Float[Tensor, "b s *two"], with_entropy: bool) -> Scores:
    """The scores to return: one tensor, or with entropy a pair."""
    if not with_entropy:
        return scores
    logprob, entropy = scores.unbind(-1)
    return logprob, entropy


class FilteredLogprob(torch.autograd.Function):
    """`sampling.forward` and `sampling.backward`, for `.apply`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LogprobOptions, limits: Limits) -> Tensor:
        return sampling.forward(ctx, logits, target, options, limits)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return sampling.backward(ctx, cotangent), None, None, None


@dataclass(frozen=True)
class StoredIds:
    """This rank's ids in stored order, `local`, and the cp group, if any, that may shard them.

    Stored position j is original position seq_index[j]. A mesh dim named `cp` shards the stored order evenly, with
    block r on its rank r. No other mesh dim may shard the sequence.
    """

    local: Int[Tensor, "b _"]
    cp_group: ProcessGroup | None
    is_sharded: bool

    @property
    def cp(self) -> int:
        return rank_and_size(self.cp_group)[1]

    @property
    def size(self) -> int:
        """Positions of the full stored order."""
        return self.local.shape[1] * (self.cp if self.is_sharded else 1)

    def full(self) -> Int[Tensor, "b s"]:
        """All ids in stored order."""
        if self.cp_group is None or not self.is_sharded:
            return self.local
        return all_gather_concat(self.local, self.cp_group, 1, [self.local.shape[1]] * self.cp)


def stored_ids(ids: Tensor | DTensor) -> StoredIds:
    """The ids of a DTensor, possibly sharded by its mesh dim `cp`, or of a plain tensor, which has all of them."""
    from torch.distributed.tensor import DTensor

    if not isinstance(ids, DTensor):
        return StoredIds(ids, None, False)
    names = ids.device_mesh.mesh_dim_names or ()
    group = ids.device_mesh.get_group("cp") if "cp" in names else None
    return StoredIds(ids.to_local(), group, group is not None and ids.placements[names.index("cp")].is_shard(1))


def score_dtensor(
    logits: DTensor,
    ids: Tensor | DTensor,
    seq_index: Tensor | None,
    chunk_size: int | None,
    params: SamplingParams | None,
    with_entropy: bool = False,
) -> Scores:
    """Next-token scores of DTensor logits; with grad disabled nothing is saved."""
    inference_only = not torch.is_grad_enabled()
    options, limits = scoring_options(*dtensor_range(logits), chunk_size, params, inference_only, with_entropy)
    return score_in_stored_order(logits.to_local(), stored_ids(ids), seq_index, options, limits)


def score_in_stored_order(
    logits: Float[Tensor, "b l v"],
    ids: StoredIds,
    seq_index: Int64[Tensor, " s"] | None,
    options: LogprobOptions,
    limits: Limits,
) -> Scores:
    """Next-token scores in original order: "b s/cp v/tp", "b s/cp" -> "b u cp=I"."""
    # Without an index or a cp group, all positions are here in the original order.
    if seq_index is None or ids.cp_group is None:
        return score_over_cp(logits, ids.local, None, options, limits)
    size, stored = logits.shape[1] * ids.cp, seq_index.long().to(logits.device)
    original = inverse_permutation(stored)
    # Shift in original order, then return to stored order, which is the logits'.
    target = next_ids(ids.full().to(logits.device)[:, original], size)[:, stored]
    scores = score(logits, target.chunk(ids.cp, dim=1)[ids.cp_group.rank()], options, limits)
    full = all_gather(scores, ids.cp_group, out="I", dim=1)[:, original][:, : max(size - 1, 0)]
    return apart(full, options.with_entropy)


def validate_shards(logits_name: str, logits: Tensor, ids_name: str, ids: Tensor | DTensor) -> None:
    """Validate the local tensors of DTensors: floating logits [b, l, v] and ids [b, s]."""
    sizes: dict[str, Any] = {}
    check(TensorKind("b l v/tp"), logits_name, logits, sizes)
    check(TensorKind("b s", "ids"), ids_name, stored_ids(ids).local, sizes)


def why_not_dtensors(name: str, logits: DTensor, ids: Tensor | DTensor, seq_index: Tensor | None) -> str | None:
    """Why DTensor logits and ids cannot be scored together, or None."""
    from torch.distributed.tensor import DTensor

    axes = logits.device_mesh.mesh_dim_names or ()
    reason = why_not_sharded_over_tp(name, logits)
    if reason:
        return reason
    if "cp" in axes and not isinstance(ids, DTensor) and logits.placements[axes.index("cp")].is_shard():
        return f"{name} is sharded over cp but input_ids is a plain tensor; pass a DTensor"
    if seq_index is not None and "cp" not in axes:
        return f"seq_index is given but the mesh has no dim 'cp' (mesh dims: {', '.join(axes)})"
    reason = _why_not_alike_over_cp(name, logits, ids, seq_index)
    return reason or why_not_stored(name, logits.to_local().shape[1], "input_ids", ids, seq_index)


def _why_not_alike_over_cp(name: str, logits: DTensor, ids: Tensor | DTensor, seq_index: Tensor | None) -> str | None:
    """Why logits and ids with these placements over cp cannot be scored together, or None."""
    stored = stored_ids(ids)
    if stored.cp == 1:
        return None
    axes = logits.device_mesh.mesh_dim_names or ()
    if "cp" in axes and logits.placements[axes.index("cp")].is_shard():
        if seq_index is not None or stored.is_sharded:
            return None
        return f"seq_index is None but {name} is sharded over cp={stored.cp}; pass the [s] index of stored positions"
    if stored.is_sharded:
        return f"input_ids is sharded over cp but {name} is Replicate; redistribute one of them"
    if seq_index is not None:
        return f"seq_index is given but {name} is Replicate over cp; drop it, or shard the logits over cp"
    return None


def why_not_stored(
    logits_name: str, local: int, ids_name: str, ids: Tensor | DTensor, seq_index: Tensor | None
) -> str | None:
    """Why ids do not fit the stored order `seq_index` of logits with `local` positions on each cp rank, or None."""
    from torch.distributed.tensor import DTensor

    # 1. Only the mesh dim `cp` may shard the sequence of a DTensor, and evenly.
    stored, reason = stored_ids(ids), None
    if isinstance(ids, DTensor):
        reason = why_not_sharded_by(ids_name, ids, {"cp": 1})
        if not reason and stored.is_sharded:
            reason = indivisible("s", ids.shape[1], "cp", stored.cp, "contiguous")
    # 2. The order is the original one without cp, and also if cp replicates the ids and there is no seq_index.
    cp = stored.cp if stored.is_sharded or seq_index is not None else 1
    size = local * cp
    if not reason and stored.size > size:
        reason = why_not_covered(ids_name, stored.size, logits_name, local, cp)
        if cp < stored.cp:
            reason = f"{reason}; where cp={stored.cp} shards the logits, pass seq_index"
    if reason or (seq_index is None and cp == 1):
        return reason
    # 3. Over cp, ids and logits have the same number of positions, and the index is a permutation of them.
    if stored.cp_group is None:
        return (
            f"seq_index is given but {ids_name} has no mesh dim 'cp'; pass it as a DTensor of such a mesh, "
            "or no seq_index"
        )
    if seq_index is None:
        return (
            f"seq_index is None but {ids_name} is sharded over cp={stored.cp}; pass the [s] index of stored positions"
        )
    if stored.size != size:
        return f"{ids_name} has {stored.size} positions but {logits_name} covers {size}; a stored order is not padded"
    if seq_index.is_meta:
        return "seq_index is on meta, without values; pass the index of stored positions"
    every = torch.arange(size, device=seq_index.device)
    if seq_index.shape != every.shape or not torch.equal(seq_index.sort().values.long(), every):
        return f"seq_index is not a permutation of 0..{size - 1}"
    return None
