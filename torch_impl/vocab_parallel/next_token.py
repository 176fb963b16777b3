"""Log-probabilities of next tokens, from logits cut over tp and over cp.

Ids come unshifted: position t is scored against id t + 1, and the last position is dropped. Logits may cover
more positions than there are ids. An id that nobody owns scores 0.0 and has no gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel.arguments import check_logits
from torch_impl.vocab_parallel.sampling_params import SamplingParams
from torch_impl.vocab_parallel.scoring import Scoring, check_over_cp, scored_over_cp
from torch_impl.vocab_parallel.stored_order import check_placements, scored_in_stored_order, stored_ids
from torch_impl.vocab_parallel.vocab_range import check_own_rank, gathered_range, range_of_dtensor

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


def get_next_token_logprobs_from_logits(
    input_ids: Int[Tensor, "b s"] | DTensor,
    next_token_logits: Float[Tensor, "b l v"] | DTensor,
    seq_index: Int[Tensor, " s"] | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
    sampling_params: SamplingParams | None = None,
    chunk_size: int | None = None,
) -> Float[Tensor, "b u"]:
    """Log-probability of each next token, by the route that the arguments name.

        a group   "b s/cp:dual_chunk_swap v/tp", "b s"   ->   "b u tp=I cp=R"
        DTensor   "b s/cp v/tp", "b s/cp"                ->   "b u tp=I cp=I"
        neither   "b s/cp:dual_chunk_swap v", "b s"      ->   "b u cp=R"

    `next_token_logits` are a plain tensor or a DTensor. They are never copied to another dtype, ids move to their
    device, and shards may differ in width. With `cp=R` cotangents are summed over cp: a loss repeated on each cp rank
    gives cp times the gradient; divide by cp or let each rank own a share.

    Cost:   that of the route; with a group 1 more all_gather of one int64 over tp, and one host read.
    Errors: those of the route; ValueError for a rank that is missing or not the group's, seq_index without
            DTensor logits, or DTensor logits together with a group.
    """
    from torch.distributed.tensor import DTensor

    function, name = "vocab_parallel.get_next_token_logprobs_from_logits", "next_token_logits"
    groups = {"vocab_parallel_group": vocab_parallel_group, "context_parallel_group": context_parallel_group}
    if isinstance(next_token_logits, DTensor):
        for given in (key for key, group in groups.items() if group is not None):
            raise ValueError(f"{function}: {name} is a DTensor, whose mesh has the groups; drop {given}")
        return _of_dtensor(function, name, next_token_logits, input_ids, seq_index, chunk_size, sampling_params)
    if seq_index is not None:
        raise ValueError(f"{function}: seq_index is given but {name} is no DTensor; drop it or pass a DTensor")
    check_own_rank(function, vocab_parallel_rank, vocab_parallel_group)
    check_logits(function, name, next_token_logits)
    width = next_token_logits.shape[-1]
    scoring = Scoring(
        function,
        vocab_parallel_group,
        0,
        width,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
        group_name="vocab_parallel_group",
        logits_name=name,
        ids_name="input_ids",
        whole_rows=vocab_parallel_group is None,
    )
    check_over_cp(scoring, next_token_logits, input_ids, context_parallel_group)
    if vocab_parallel_group is not None:
        start, end = gathered_range(width, vocab_parallel_group, next_token_logits.device)
        scoring = replace(scoring, vocab_start=start, vocab_end=end)
    return scored_over_cp(scoring, next_token_logits, input_ids, context_parallel_group)


def _of_dtensor(
    function: str,
    name: str,
    logits: DTensor,
    input_ids: Tensor | DTensor,
    seq_index: Tensor | None,
    chunk_size: int | None,
    sampling_params: SamplingParams | None,
) -> Float[Tensor, "b u"]:
    """Scores by the DTensor route, group and range taken from the mesh of the logits."""
    from torch.distributed.tensor import DTensor

    if not isinstance(logits, DTensor):
        raise TypeError(f"{function}: {name} is a {type(logits).__name__}; pass a DTensor with a mesh dim 'tp'")
    group, start, end = range_of_dtensor(function, name, logits)
    axes = logits.device_mesh.mesh_dim_names or ()
    check_placements(function, name, logits, {"cp": 1, "tp": logits.ndim - 1})
    if "cp" in axes and not isinstance(input_ids, DTensor) and logits.placements[axes.index("cp")].is_shard():
        raise ValueError(f"{function}: {name} is cut over cp but input_ids is a plain tensor; pass a DTensor")
    if seq_index is not None and "cp" not in axes:
        raise ValueError(f"{function}: seq_index is given but the mesh has no dim 'cp' (mesh dims: {', '.join(axes)})")
    scoring = Scoring(
        function,
        group,
        start,
        end,
        inference_only=not torch.is_grad_enabled(),
        chunk_size=chunk_size,
        sampling_params=sampling_params,
        logits_name=name,
        ids_name="input_ids",
    )
    return scored_in_stored_order(scoring, logits.to_local(), stored_ids(function, "input_ids", input_ids), seq_index)
