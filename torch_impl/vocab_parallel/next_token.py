"""Log-probabilities of next tokens, from logits cut over tp and over cp.

Ids come unshifted: position t is scored against id t + 1, and the last position is dropped. Logits may cover
more positions than there are ids. An id that nobody owns scores 0.0 and has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_gather
from torch_impl.collectives.plain import gathered
from torch_impl.layouts.index_arrays import inverted
from torch_impl.vocab_parallel import arguments as a
from torch_impl.vocab_parallel import fused_logprob, sampling
from torch_impl.vocab_parallel.arguments import check_logits
from torch_impl.vocab_parallel.filter_bounds import Limits, checked_limits
from torch_impl.vocab_parallel.sampling import SamplingParams
from torch_impl.vocab_parallel.sequence_gather import (
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    check_cut_over_cp,
    checked_cp_group,
)
from torch_impl.vocab_parallel.vocab_range import (
    NO_ID,
    check_own_rank,
    check_placements,
    gathered_range,
    range_of_dtensor,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Scoring:
    """How positions are scored, and what an error calls the function and its arguments."""

    function: str
    group: ProcessGroup | None
    vocab_start: int
    vocab_end: int
    inference_only: bool = False
    chunk_size: int | None = None
    sampling_params: SamplingParams | None = None
    group_name: str = "tp_group"
    logits_name: str = "vocab_parallel_logits"
    ids_name: str = "target"
    whole_rows: bool = False

    @property
    def plan(self) -> fused_logprob.Plan:
        params = self.sampling_params
        return fused_logprob.Plan(
            self.function,
            self.group,
            self.vocab_start,
            self.vocab_end,
            temperature=1.0 if params is None else params.temperature,
            chunk_size=self.chunk_size,
            inference_only=self.inference_only,
            group_name=self.group_name,
            whole_rows=self.whole_rows,
        )

    @property
    def limits(self) -> Limits:
        params = self.sampling_params
        return Limits(None, None) if params is None else checked_limits(self.function, params.top_k, params.top_p)

    def check(self, logits: Tensor, ids: Tensor) -> None:
        """Refuse what cannot be scored, before any collective."""
        fused_logprob.check(self.plan, logits, None)
        _ = self.limits
        a.check_ids(self.function, self.ids_name, ids)
        a.check_range(self.function, self.vocab_start, self.vocab_end, self.logits_name, logits)
        if logits.ndim != 3 or ids.ndim != 2 or len(ids) != len(logits):
            raise ValueError(
                f"{self.function}: {self.ids_name} is {list(ids.shape)} but {self.logits_name} is "
                f"{list(logits.shape)}; they must be [b, s] and [b, s, v]"
            )

    def check_length(self, positions: int, local: int, cp: int) -> None:
        """No more ids than the logits of all cp ranks have positions."""
        if positions > local * cp:
            per_rank = f" ({local} per rank, cp={cp})" if cp > 1 else ""
            raise ValueError(
                f"{self.function}: {self.ids_name} has {positions} positions "
                f"but {self.logits_name} covers {local * cp}{per_rank}"
            )

    def scores(self, logits: Float[Tensor, "b s v"], target: Int[Tensor, "b s"]) -> Float[Tensor, "b s"]:
        """log p of targets that are shifted already, on this rank's positions."""
        return _Scores.apply(logits, target, self.plan, self.limits)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, plan: fused_logprob.Plan, limits: Limits) -> Tensor:
        return sampling.forward(ctx, logits, target, plan, limits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return sampling.backward(ctx, cotangent), None, None, None


def next_ids(ids: Int[Tensor, "b s"], size: int) -> Int[Tensor, "b size"]:
    """Id t + 1 at position t of `size` positions; nobody's at the last one and past the ids."""
    shifted = ids.new_full((len(ids), size), NO_ID)
    shifted[:, : max(ids.shape[1] - 1, 0)] = ids[:, 1:]
    return shifted


def check_over_cp(scoring: Scoring, logits: Tensor, ids: Tensor, cp_group: ProcessGroup | None) -> None:
    """Refuse what `scored_over_cp` cannot score."""
    scoring.check(logits, ids)
    cp = 1 if cp_group is None else checked_cp_group(scoring.function, cp_group).size()
    scoring.check_length(ids.shape[1], logits.shape[1], cp)
    check_cut_over_cp(scoring.function, logits.shape[1] * cp, cp)


def scored_over_cp(
    scoring: Scoring, logits: Float[Tensor, "b l v"], ids: Int[Tensor, "b s"], cp_group: ProcessGroup | None
) -> Float[Tensor, "b u"]:
    """Next-token scores, positions cut over cp by DualChunkSwap: "b s/cp:dual_chunk_swap v/tp" -> "b u cp=R"."""
    check_over_cp(scoring, logits, ids, cp_group)
    cp, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    target = next_ids(ids.to(logits.device), logits.shape[1] * cp)
    scores = scoring.scores(logits, _get_tokens_on_this_cp_rank(target, rank, cp))
    if cp_group is not None:
        scores = allgather_cp_sharded_tensor(scores, cp_group)
    return scores[:, : max(ids.shape[1] - 1, 0)]


@dataclass(frozen=True)
class StoredIds:
    """Ids as a rank holds them, `local`, and the cp group that cuts them; None for ids that are whole here."""

    local: Int[Tensor, "b _"]
    cp_group: ProcessGroup | None
    is_cut: bool

    @property
    def cp(self) -> int:
        return 1 if self.cp_group is None else self.cp_group.size()

    @property
    def size(self) -> int:
        """Positions of the whole stored order."""
        return self.local.shape[1] * (self.cp if self.is_cut else 1)

    def whole(self) -> Int[Tensor, "b s"]:
        """All ids in stored order."""
        if self.cp_group is None or not self.is_cut:
            return self.local
        return gathered(self.local, self.cp_group, 1, [self.local.shape[1]] * self.cp)


def stored_ids(function: str, name: str, ids: Tensor | DTensor) -> StoredIds:
    """The ids of a DTensor, of which only the mesh dim `cp` may cut the sequence; or plain ones, which are whole."""
    from torch.distributed.tensor import DTensor

    if not isinstance(ids, DTensor):
        return StoredIds(ids, None, False)
    check_placements(function, name, ids, {"cp": 1})
    names = ids.device_mesh.mesh_dim_names or ()
    group = ids.device_mesh.get_group("cp") if "cp" in names else None
    is_cut = group is not None and ids.placements[names.index("cp")].is_shard(1)
    if group is not None and is_cut and ids.shape[1] % group.size():
        world = group.size()
        padded = -(-ids.shape[1] // world) * world
        raise ValueError(
            f"{function}: s={ids.shape[1]} cannot be cut by contiguous over cp={world} "
            f"(needs a multiple of {world}); pad to {padded}"
        )
    return StoredIds(ids.to_local(), group, is_cut)


def scored_in_stored_order(
    scoring: Scoring, logits: Float[Tensor, "b l v"], ids: StoredIds, seq_index: Int64[Tensor, " s"] | None
) -> Float[Tensor, "b u"]:
    """Next-token scores in original order: "b s/cp v/tp", "b s/cp" -> "b u cp=I"."""
    cp_group = ids.cp_group
    if seq_index is None and ids.cp == 1:
        return scored_over_cp(scoring, logits, ids.local, None)
    if cp_group is None:
        raise ValueError(
            f"{scoring.function}: seq_index is given but {scoring.ids_name} has no mesh dim 'cp'; pass it as a "
            "DTensor of such a mesh, or no seq_index"
        )
    scoring.check(logits, ids.local)
    size = logits.shape[1] * ids.cp
    scoring.check_length(ids.size, logits.shape[1], ids.cp)
    stored = _checked_index(scoring, ids, seq_index, size).to(logits.device)
    original = inverted(stored)
    target = next_ids(ids.whole().to(logits.device)[:, original], size)[:, stored]
    scores = scoring.scores(logits, target.chunk(ids.cp, dim=1)[cp_group.rank()])
    return all_gather(scores, cp_group, out="I", dim=1)[:, original][:, : max(size - 1, 0)]


def _checked_index(scoring: Scoring, ids: StoredIds, seq_index: Tensor | None, size: int) -> Int64[Tensor, " s"]:
    """`seq_index`, a permutation of as many positions as the logits and the ids have."""
    name = scoring.ids_name
    if seq_index is None:
        raise ValueError(
            f"{scoring.function}: seq_index is None but {name} is cut over cp={ids.cp}; "
            "pass the [s] index of stored positions"
        )
    if ids.size != size:
        raise ValueError(
            f"{scoring.function}: {name} has {ids.size} positions but {scoring.logits_name} covers {size}; "
            "a stored order is not padded"
        )
    every = torch.arange(size, device=seq_index.device)
    if seq_index.shape != every.shape or not torch.equal(seq_index.sort().values.long(), every):
        raise ValueError(f"{scoring.function}: seq_index is not a permutation of 0..{size - 1}")
    return seq_index.long()


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
