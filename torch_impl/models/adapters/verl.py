"""verl's `agg_loss`: a micro-batch's share of a step's loss, from counts that the caller has summed over all ranks.

With losses l of the tokens t that count in sequence i, N = `batch_num_tokens`, B = `global_batch_size`,
F = `loss_scale_factor` and d = `dp_size`:

    token-mean                 d sum_it l_it / N
    token-sum                  d sum_it l_it
    seq-mean-token-sum         d sum_it l_it / B
    seq-mean-token-sum-norm    d sum_it l_it / (B F)
    seq-mean-token-mean        d sum_i mean_t l_it / B
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from torch_impl.contract import OneOf, PositiveInt, Rejected, Sharded, ShardedAny, TypeProblem, contract, type_name
from torch_impl.models.loss import normalised

Mode = Annotated[
    str, OneOf(("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"))
]


class _CountKind:
    """A count of the full step: an integer above 0, or a tensor of one."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, Tensor):
            is_one = value.ndim == 0 and not value.dtype.is_floating_point and value.dtype != torch.bool
            return None if is_one else " is not a tensor of one integer; pass a count"
        if not isinstance(value, int) or isinstance(value, bool):
            return TypeProblem(f"={value!r} is {type_name(value)}; pass a count")
        return None if value > 0 else f"={value} must be at least 1"


Count = Annotated[int | Tensor, _CountKind()]


@contract
def agg_loss(
    loss_mat: Sharded[Tensor, "b s"],
    loss_mask: ShardedAny[Tensor, "b s"],
    loss_agg_mode: Mode,
    dp_size: PositiveInt = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: Count | None = None,
) -> Sharded[Tensor, "dp=P"]:
    """This micro-batch's share of a step's loss, for gradients that are averaged over `dp_size` ranks afterwards.

    A token counts where `loss_mask` is not 0, and a sequence counts if it has such a token. Losses under the mask are
    not read and may be NaN. On one rank the counts may be left out: then the micro-batch is counted, so that it must be
    the full step. In float32 or wider.

    Unlike verl's, `seq-mean-token-sum-norm` needs `loss_scale_factor`: the width of a padded micro-batch depends on
    the other sequences in it. `loss_divisors` counts over the ranks by itself.

    Cost:   no collective; the host reads nothing.
    Errors: TypeError for a mask or a count of another type; ValueError for a mask of another shape, an unknown mode, a
            count below 1, and a mode's count that is missing where `dp_size` is larger than 1.
    """
    counts = loss_mask != 0
    lengths = counts.sum(1)
    divisor = torch.ones_like(lengths)
    if loss_agg_mode == "token-mean":
        divisor = divisor * _count("batch_num_tokens", batch_num_tokens, lengths.sum(), dp_size)
    elif loss_agg_mode != "token-sum":
        divisor = divisor * _count("global_batch_size", global_batch_size, (lengths > 0).sum(), dp_size)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None:
            raise Rejected("loss_agg_mode='seq-mean-token-sum-norm' needs loss_scale_factor; pass the longest response")
        divisor = divisor * loss_scale_factor
    elif loss_agg_mode == "seq-mean-token-mean":
        divisor = divisor * lengths
    return normalised(loss_mat, torch.where(counts, divisor[:, None], 0), dp_size)


def _count(name: str, given: int | Tensor | None, own: Tensor, dp_size: int) -> int | Tensor:
    """The count that was given, else the micro-batch's `own` count, on one rank only."""
    if given is None and dp_size > 1:
        raise Rejected(f"dp_size={dp_size} needs {name}; pass the count of all ranks")
    return own if given is None else given
