"""Scores of a sequence: the log-probability of each next token, as the sampling parameters say.

Rank r of tp holds its columns of the logits of its positions and all ids, unshifted. Position t is scored
against id t + 1. The last position, and any that lies past the ids, is scored as nobody's: 0 without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel import arguments as a
from torch_impl.vocab_parallel import joint, sampling
from torch_impl.vocab_parallel.sampling_params import Limits, SamplingParams, checked_limits
from torch_impl.vocab_parallel.sequence_gather import (
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    check_cut_over_cp,
    checked_cp_group,
)
from torch_impl.vocab_parallel.vocab_range import NO_ID


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
    def plan(self) -> joint.Plan:
        params = self.sampling_params
        return joint.Plan(
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
        joint.check(self.plan, logits, None)
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
    def forward(ctx: Any, logits: Tensor, target: Tensor, plan: joint.Plan, limits: Limits) -> Tensor:
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
