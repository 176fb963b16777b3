"""Top-k distillation: log-probabilities of student and teacher at the teacher's k ids.

The student's logits are sharded by columns over tp and by positions over cp (DualChunkSwap); every rank has all of the
teacher's k logits and ids. Shards of the vocabulary are in rank order and may differ in width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import Group, Rejected, Sharded, ShardedIds, check, contract
from torch_impl.contract.tensor_kinds import TensorKind
from torch_impl.vocab_parallel.fused_logprob import FusedLogprob, LogprobOptions
from torch_impl.vocab_parallel.sequence_gather import GatherOverCp, rank_and_size, why_not_covered, why_not_over_cp
from torch_impl.vocab_parallel.topk import LogitsAt, local_ids
from torch_impl.vocab_parallel.vocab_range import (
    IGNORED_ID,
    all_gather_range_and_size,
    dtensor_range,
    why_not_rank,
    why_not_sharded_over_tp,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@contract
def get_distillation_topk_logprobs_from_logits(
    student_logits: Sharded[Tensor, "b l/cp:dual_chunk_swap v/tp"] | DTensor,
    teacher_topk_logits: Sharded[Tensor, "b s k tp=I cp=R"],
    teacher_topk_indices: ShardedIds[Tensor, "b s k"],
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Group[ProcessGroup, "tp"] | None = None,
    context_parallel_group: Group[ProcessGroup, "cp"] | None = None,
) -> tuple[
    Sharded[Tensor, "b u k tp=I cp=R"], Sharded[Tensor, "b u k tp=I cp=R"], Sharded[Tensor, "b u tp=I cp=R"] | None
]:
    """Student's and teacher's log-probabilities at the teacher's ids, and the student's negative entropy or None.

    student   log softmax of `student_logits` at the ids: over the full vocabulary with `zero_outside_topk`, else over
              its k logits at the ids
    teacher   log softmax over the k `teacher_topk_logits`
    entropy   with `calculate_entropy`, h = sum_v p_v log p_v over the student's full vocabulary

    The l = s/cp positions of the student on each rank are in DualChunkSwap order; they may cover more than the
    teacher's s (padding). Nothing is shifted: both sides drop their last position, u = s - 1. An id of
    `teacher_topk_indices` outside the vocabulary scores 0.0 without gradient and is left out of the student's sum over
    k. Without the vocabulary's or the sequence's group, each rank has the full vocabulary or sequence. A DTensor brings
    both groups: its mesh dim `tp` shards the last dim, and its mesh dim `cp`, if any, shards the sequence. Results are
    float32 or wider; gradients have their logits' dtype.
    Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp or
    use each score in the loss of one rank alone.

    Cost:   over tp forward 1 all_gather of k + 2 numbers per token of this rank, k + 3 with the entropy; with
            neither entropy nor `zero_outside_topk` 1 all_reduce of k. A vocabulary group also takes 1 all_gather of one
            int64 and one host read. Over cp forward 1 all_gather of k numbers per token, k + 1 with the entropy.
            Backward only 1 reduce_scatter over cp. Saves the student's logits by reference and 8 + 4 k bytes per token,
            with the entropy 4 more (float64 logits: 16 + 4 k, and 8 more). Without `zero_outside_topk` it also saves a
            few numbers per id, and only these if there is no entropy either.
    Errors: TypeError for a group that is not a ProcessGroup, ids that are not int32 or int64, logits not floating;
            ValueError for k = 0, shapes that disagree, more ids than positions of the logits, a sequence that cannot be
            sharded over cp, a missing or wrong rank, a DTensor passed with groups or with other placements.
    """
    from torch.distributed.tensor import DTensor

    # 1. This rank's logits, the groups, this rank's ids [start, end), and the vocabulary's `size`.
    groups = vocab_parallel_group, context_parallel_group
    if isinstance(student_logits, DTensor):
        cp_group = _cp_group_of(student_logits, *groups)
        reason = _why_not_distilled(student_logits.to_local(), teacher_topk_indices, cp_group)
        if reason:
            raise Rejected(reason)
        logits, size = student_logits.to_local(), student_logits.shape[-1]
        group, start, end = dtensor_range(student_logits)
    else:
        logits, (group, cp_group) = student_logits, groups
        reason = why_not_rank(vocab_parallel_rank, group) or _why_not_distilled(logits, teacher_topk_indices, cp_group)
        if reason:
            raise Rejected(reason)
        start, end, size = 0, logits.shape[-1], logits.shape[-1]
        if group is not None:
            start, end, size = all_gather_range_and_size(logits.shape[-1], group, logits.device)
    # 2. The student at this cp rank's positions: read all logits once for scores and entropy, or only the k logits.
    k, u = teacher_topk_indices.shape[-1], max(teacher_topk_indices.shape[1] - 1, 0)
    ids = local_ids(teacher_topk_indices.to(logits.device), logits.shape[1], cp_group, positions=u)
    if zero_outside_topk or calculate_entropy:
        options = LogprobOptions(
            group, start, end, with_entropy=calculate_entropy, has_id_dim=True, normalised=zero_outside_topk
        )
        outputs = FusedLogprob.apply(logits, ids, options)
    else:
        outputs = (LogitsAt.apply(logits, ids, start, end, group, None),)
    student = outputs[0] if zero_outside_topk else _log_softmax_over_k(outputs[0], (ids >= 0) & (ids < size))
    # 3. Gather all positions, scores and entropy in one message.
    scores = torch.cat([student, *(h.unsqueeze(-1) for h in outputs[1:])], -1)
    if cp_group is not None:
        scores = GatherOverCp.apply(scores, cp_group, 1)
    teacher = teacher_topk_logits[:, :u]
    student, entropy = scores[:, :u, :k], scores[:, :u, k] if calculate_entropy else None
    return student, _log_softmax_over_k(teacher, torch.ones_like(teacher, dtype=torch.bool)), entropy


def _log_softmax_over_k(logits: Float[Tensor, "b s k"], in_vocabulary: Bool[Tensor, "b s k"]) -> Float[Tensor, "b s k"]:
    """Log-softmax over the k logits of each position; ids outside the vocabulary are left out and score 0."""
    # Slot i is scored as id i of a vocabulary of k ids, so the fused core computes all k in one read. Logits of
    # out-of-vocabulary ids become -inf, which removes them from the sum, and IGNORED_ID makes their score 0.
    k = logits.shape[-1]
    slots = torch.where(in_vocabulary, torch.arange(k, device=logits.device), IGNORED_ID)
    options = LogprobOptions(None, 0, k, has_id_dim=True)
    return FusedLogprob.apply(torch.where(in_vocabulary, logits, -torch.inf), slots, options)[0]


def _cp_group_of(logits: DTensor, group: ProcessGroup | None, cp_group: ProcessGroup | None) -> ProcessGroup | None:
    """The group that shards a DTensor's sequence, or None; ValueError for other placements."""
    check(TensorKind("b l v/tp"), "student_logits", logits.to_local())
    for name, each in (("vocab_parallel_group", group), ("context_parallel_group", cp_group)):
        if each is not None:
            raise Rejected(f"student_logits is a DTensor, whose mesh has the groups; drop {name}")
    # A mesh dim `cp` that does not shard the sequence means full sequences on every rank: no group.
    reason = why_not_sharded_over_tp("student_logits", logits)
    axes = logits.device_mesh.mesh_dim_names or ()
    if not reason and "cp" in axes and logits.placements[axes.index("cp")].is_shard():
        cp_group = logits.device_mesh.get_group("cp")
        reason = why_not_over_cp(logits.shape[1], cp_group.size())
    if reason:
        raise Rejected(reason)
    return cp_group


def _why_not_distilled(logits: Tensor, ids: Tensor, cp_group: ProcessGroup | None) -> str | None:
    """Why local logits and the teacher's ids do not fit each other, or None."""
    cp = rank_and_size(cp_group)[1]
    if len(ids) != len(logits):
        shapes = f"teacher_topk_indices is {list(ids.shape)} but student_logits is {list(logits.shape)}"
        return f"{shapes}; they must be [b, s, k] and [b, s, v]"
    if ids.shape[-1] == 0:
        return "teacher_topk_indices has k=0; top-k distillation needs at least one id"
    return why_not_covered("teacher_topk_indices", ids.shape[1], "student_logits", logits.shape[1], cp)
