"""Top-k distillation: a student's and a teacher's log-probabilities at the teacher's k ids.

Rank r of tp holds some columns of the student's logits, rank r of cp some positions (DualChunkSwap); every rank
has the whole of the teacher's k logits and ids. Shards of the vocabulary are in rank order and may differ in width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel import arguments as a
from torch_impl.vocab_parallel import fused_logprob
from torch_impl.vocab_parallel.fused_logprob import Plan
from torch_impl.vocab_parallel.sequence_gather import allgather_cp_sharded_tensor, check_cut_over_cp
from torch_impl.vocab_parallel.topk import LogitsAt, check_positions, ids_held
from torch_impl.vocab_parallel.vocab_range import (
    NO_ID,
    check_own_rank,
    check_placements,
    gathered_range_and_size,
    range_of_dtensor,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


FUNCTION = "vocab_parallel.get_distillation_topk_logprobs_from_logits"

STUDENT, TEACHER, IDS = "student_logits", "teacher_topk_logits", "teacher_topk_indices"


def get_distillation_topk_logprobs_from_logits(
    student_logits: Float[Tensor, "b l v"] | DTensor,
    teacher_topk_logits: Float[Tensor, "b s k"],
    teacher_topk_indices: Int[Tensor, "b s k"],
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
    context_parallel_group: ProcessGroup | None = None,
) -> tuple[Float[Tensor, "b u k"], Float[Tensor, "b u k"], Float[Tensor, "b u"] | None]:
    """Student's and teacher's log-probabilities at the teacher's ids, and the student's negative entropy or None.

        student_logits  "b s/cp:dual_chunk_swap v/tp"     teacher_topk_logits  "b s k tp=I cp=R"
        teacher_topk_indices  "b s k"     ->   "b u k tp=I cp=R", "b u k tp=I cp=R", "b u tp=I cp=R",   u = s - 1

    student   log softmax over the whole vocabulary, at the ids, with `zero_outside_topk`; else over its own k logits
    teacher   log softmax over its own k logits
    entropy   h = sum_v p_v log p_v over the student's whole vocabulary, in both cases; with `calculate_entropy`

    Nothing is rolled: both sides lose their last position. The student's logits may cover more positions than the
    teacher's (padding). An id that nobody owns scores 0.0 without gradient and is no part of the student's sum over
    k. Without a group the vocabulary is whole, or the sequence; a DTensor of the mesh dims `tp`, which cuts the last
    dim, and `cp`, which cuts the sequence if it is there, brings both groups. Results are float32 or wider; gradients
    have their logits' dtype.
    Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp or
    let each rank own a share.

    Cost:   over tp forward 1 all_gather of k + 2 numbers per token of this rank, k + 3 with the entropy; with
            neither entropy nor `zero_outside_topk` 1 all_reduce of k. With a group 1 more all_gather of one int64, and
            one host read. Over cp forward 1 all_gather of k numbers per token, k + 1 with the entropy. Backward only
            1 reduce_scatter over cp. Saves the logits by reference and 12 + 4 k bytes per token, else numbers of k.
    Errors: TypeError for what is no group, ids that are no integers, logits not floating; ValueError for k = 0,
            shapes that disagree, more positions than the logits cover, a sequence that cannot be cut over cp, a rank
            that is missing or not the group's, a DTensor with groups besides or cut otherwise.
    """
    shard = _shard_of(student_logits, vocab_parallel_rank, vocab_parallel_group, context_parallel_group)
    _check(shard, teacher_topk_logits, teacher_topk_indices)
    logits, group, cp_group = shard.logits, shard.group, shard.cp_group
    start, end, size = shard.owned or gathered_range_and_size(logits.shape[-1], group, logits.device)  # pyright: ignore[reportArgumentType]
    k, u = teacher_topk_indices.shape[-1], max(teacher_topk_indices.shape[1] - 1, 0)
    ids = ids_held(teacher_topk_indices.to(logits.device), logits.shape[1], cp_group, positions=u)
    plan = Plan(
        FUNCTION,
        group,
        start,
        end,
        with_entropy=calculate_entropy,
        whole_rows=group is None,
        several=True,
        normalised=zero_outside_topk,
    )
    reads_all = zero_outside_topk or calculate_entropy
    parts = _Joint.apply(logits, ids, plan) if reads_all else (LogitsAt.apply(logits, ids, start, end, group, None),)
    student = parts[0] if zero_outside_topk else _log_softmax_over_k(parts[0], (ids >= 0) & (ids < size))
    scores = torch.cat([student, *(h.unsqueeze(-1) for h in parts[1:])], -1)
    if cp_group is not None:
        scores = allgather_cp_sharded_tensor(scores, cp_group)
    teacher = teacher_topk_logits[:, :u]
    student, entropy = scores[:, :u, :k], scores[:, :u, k] if calculate_entropy else None
    return student, _log_softmax_over_k(teacher, torch.ones_like(teacher, dtype=torch.bool)), entropy


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the student's logits; the range of its ids and V, if known without asking the others."""

    logits: Tensor
    group: ProcessGroup | None
    cp_group: ProcessGroup | None
    owned: tuple[int, int, int] | None


class _Joint(torch.autograd.Function):
    """Looked-up logits or log-probabilities, and the entropy, by the joint forward and backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, plan: Plan) -> tuple[Tensor, ...]:
        return fused_logprob.forward(ctx, logits, ids, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return fused_logprob.backward(ctx, *cotangents), None, None


def _log_softmax_over_k(logits: Float[Tensor, "b s k"], is_asked: Bool[Tensor, "b s k"]) -> Float[Tensor, "b s k"]:
    """Log-softmax over the last dim of what is asked for, 0 elsewhere: the k logits are a whole vocabulary."""
    k = logits.shape[-1]
    slots = torch.where(is_asked, torch.arange(k, device=logits.device), NO_ID)
    plan = Plan(FUNCTION, None, 0, k, whole_rows=True, several=True)
    return _Joint.apply(torch.where(is_asked, logits, -torch.inf), slots, plan)[0]


def _shard_of(
    logits: Tensor | DTensor, rank: int | None, group: ProcessGroup | None, cp_group: ProcessGroup | None
) -> _Shard:
    """Logits and groups by the route that the arguments name: groups, a DTensor's mesh, or neither."""
    from torch.distributed.tensor import DTensor

    if not isinstance(logits, DTensor):
        check_own_rank(FUNCTION, rank, group)
        if group is None:
            return _Shard(logits, None, cp_group, (0, logits.shape[-1], logits.shape[-1]))
        return _Shard(logits, group, cp_group, None)
    for name, given in (("vocab_parallel_group", group), ("context_parallel_group", cp_group)):
        if given is not None:
            raise ValueError(f"{FUNCTION}: {STUDENT} is a DTensor, whose mesh has the groups; drop {name}")
    group, start, end = range_of_dtensor(FUNCTION, STUDENT, logits)
    check_placements(FUNCTION, STUDENT, logits, {"cp": 1, "tp": logits.ndim - 1})
    axes = logits.device_mesh.mesh_dim_names or ()
    if "cp" in axes and logits.placements[axes.index("cp")].is_shard():
        cp_group = logits.device_mesh.get_group("cp")
        check_cut_over_cp(FUNCTION, logits.shape[1], cp_group.size())
    return _Shard(logits.to_local(), group, cp_group, (start, end, logits.shape[-1]))


def _check(shard: _Shard, teacher: Tensor, ids: Tensor) -> None:
    """Refuse what cannot be, before any collective."""
    a.check_logits(FUNCTION, STUDENT, shard.logits)
    a.check_logits(FUNCTION, TEACHER, teacher)
    a.check_ids(FUNCTION, IDS, ids)
    if teacher.shape != ids.shape:
        raise ValueError(f"{FUNCTION}: {TEACHER} is {list(teacher.shape)} but {IDS} is {list(ids.shape)}")
    check_positions(FUNCTION, IDS, ids, STUDENT, shard.logits, shard.cp_group)
    if ids.shape[-1] == 0:
        raise ValueError(f"{FUNCTION}: {IDS} has k=0; top-k distillation needs at least one id")
