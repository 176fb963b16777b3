"""The plain forms: sum, gather and scattered sum of tensors that carry no gradient.

The differentiable collectives are made of these, forward and backward. Each takes a tensor of any strides,
leaves it alone, and returns a contiguous tensor of its own. Uneven pieces are padded to the longest one,
since no backend gathers unequal shapes in one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renames the single-tensor forms and deprecates the old names; 2.11 knows only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What values of `dtype` are summed in: float64 for float64, float32 for narrower floats, integers as they are."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def uncast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, matrix products on `device` run in the dtypes that they are given, whatever autocast says."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def widened_copy(x: Tensor) -> Tensor:
    """A contiguous copy in the dtype that sums run in."""
    return x.to(accumulator(x.dtype), copy=True, memory_format=torch.contiguous_format)


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group, on every rank. One all_reduce."""
    total = widened_copy(x)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total.to(x.dtype)


def gathered(x: Tensor, group: ProcessGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """The ranks' pieces joined along `dim`. One all_gather of the longest piece."""
    longest = max(lengths)
    piece = _padded(x.movedim(dim, 0), longest)
    joined = piece.new_empty(longest * group.size(), *piece.shape[1:])
    _all_gather(joined, piece, group=group)
    return _unpadded(joined, lengths).movedim(0, dim).contiguous()


def scattered_sum(x: Tensor, group: ProcessGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """This rank's piece of the sum over the group. One reduce_scatter of pieces as long as the longest."""
    longest = max(lengths)
    pieces = x.to(accumulator(x.dtype)).movedim(dim, 0).split(list(lengths))
    addends = torch.cat([_padded(piece, longest) for piece in pieces])
    total = addends.new_empty(longest, *addends.shape[1:])
    _reduce_scatter(total, addends, op=dist.ReduceOp.SUM, group=group)
    return total[: lengths[group.rank()]].to(x.dtype).movedim(0, dim).contiguous()


def exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    """Equal blocks of dim 0, one to each rank, and theirs in rank order. One all_to_all; x itself in a group of one."""
    if group.size() == 1:
        return x
    x = x.contiguous()
    arriving = torch.empty_like(x)
    dist.all_to_all_single(arriving, x, group=group)
    return arriving


def _padded(piece: Tensor, longest: int) -> Tensor:
    """`piece`, contiguous, with rows of zeros up to `longest` rows."""
    if len(piece) == longest:
        return piece.contiguous()
    return torch.cat([piece, piece.new_zeros(longest - len(piece), *piece.shape[1:])])


def _unpadded(joined: Tensor, lengths: Sequence[int]) -> Tensor:
    """The rows of `joined` that are no padding."""
    longest = max(lengths)
    if min(lengths) == longest:
        return joined
    return torch.cat([rows[:length] for rows, length in zip(joined.split(longest), lengths, strict=True)])
