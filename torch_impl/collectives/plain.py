"""Collectives without autograd: sum, gather, scattered sum and exchange.

The differentiable collectives call these in forward and in backward. Each takes a tensor with any strides, leaves it
unchanged and returns a contiguous tensor in new memory; only `all_gather_stack` returns a view in a group of one.
`start_messages` uses the caller's buffers instead. The public functions have validated the arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from torch_impl.collectives import large_tensors

# torch 2.13 renames the single-tensor forms and deprecates the old names; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of `dtype` values: float32 for narrower floats, else `dtype` itself."""
    if dtype in (torch.float32, torch.float64) or not dtype.is_floating_point:
        return dtype
    return torch.promote_types(dtype, torch.float32)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast on `device`, so that matrix products run in the dtypes of their arguments."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def wide_copy(x: Tensor) -> Tensor:
    """A contiguous copy in the dtype for sums."""
    return x.to(accumulator(x.dtype), copy=True, memory_format=torch.contiguous_format)


def all_reduce_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group, on every rank. One all_reduce."""
    # all_reduce works in place, so it gets a copy, in float32 or wider: a 16-bit sum is rounded only at the end.
    total = wide_copy(x)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total.to(x.dtype)


def sum_in_place(tensors: Iterable[Tensor], groups: Sequence[ProcessGroup], divisor: int = 1) -> None:
    """Sum each tensor in place over each of the groups in turn, and divide the sums.

    For each dtype 1 all_reduce of all its tensors over each group, in float32 or wider.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in by_dtype.items():
        # Sum in one wide buffer, so that the result is rounded once, at the end.
        total = torch.cat([tensor.flatten() for tensor in alike]).to(accumulator(dtype))
        for group in groups:
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        if divisor != 1:
            total /= divisor
        for tensor, result in zip(alike, total.split([each.numel() for each in alike]), strict=True):
            tensor.copy_(result.view(tensor.shape))


def all_gather_concat(x: Tensor, group: ProcessGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """The ranks' shards, concatenated along `dim`. One all_gather of the longest shard."""
    # No backend gathers unequal shapes in one message, so every shard is padded to the longest.
    longest = max(lengths)
    shard = _pad_rows(x.movedim(dim, 0), longest)
    full = large_tensors.empty((longest * group.size(), *shard.shape[1:]), x.dtype, x.device)
    _all_gather(full, shard, group=group)
    return _drop_padding(full, lengths).movedim(0, dim).contiguous()


def all_gather_stack(x: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' tensors, of one shape, stacked along a new first dim. One all_gather; a view in a group of one."""
    if group.size() == 1:
        return x.unsqueeze(0)
    stack = x.new_empty(group.size(), *x.shape)
    _all_gather(stack, x.unsqueeze(0).contiguous(), group=group)
    return stack


def reduce_scatter_sum(x: Tensor, group: ProcessGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """This rank's shard of the sum over the group. One reduce_scatter of shards as long as the longest."""
    longest = max(lengths)
    shards = x.to(accumulator(x.dtype)).movedim(dim, 0).split(list(lengths))
    # reduce_scatter gives every rank the same length, so pad to the longest and drop the padding after the sum.
    addends = torch.cat([_pad_rows(shard, longest) for shard in shards])
    total = large_tensors.empty((longest, *addends.shape[1:]), addends.dtype, x.device)
    _reduce_scatter(total, addends, op=dist.ReduceOp.SUM, group=group)
    return total[: lengths[group.rank()]].to(x.dtype).movedim(0, dim).contiguous()


def all_to_all_equal(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send block j of dim 0 to rank j; returns the received blocks in rank order.

    One all_to_all; in a group of one a copy of x.
    """
    if group.size() == 1:  # a copy here too, so that the result never aliases the argument
        return x.clone(memory_format=torch.contiguous_format)
    x = x.contiguous()
    received = large_tensors.empty(x.shape, x.dtype, x.device)
    dist.all_to_all_single(received, x, group=group)
    return received


def start_all_to_all(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> tuple[Tensor, list[Work]]:
    """Start an all_to_all of `sent[j]` rows to rank j and `received[i]` rows from rank i: (received rows, works).

    Wait for every work before reading a received row or writing to `x`.
    """
    x = x.contiguous()
    arriving = large_tensors.empty((sum(received), *x.shape[1:]), x.dtype, x.device)
    work = dist.all_to_all_single(arriving, x, list(received), list(sent), group=group, async_op=True)
    return arriving, [work] if work is not None else []


def start_messages(
    sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], group: ProcessGroup
) -> list[Work]:
    """Start sends and receives of (rank in the group, contiguous tensor) together; returns the works to wait for."""
    messages = [P2POp(dist.isend, x, group=group, group_peer=rank) for rank, x in sent]
    messages += [P2POp(dist.irecv, x, group=group, group_peer=rank) for rank, x in received]
    return dist.batch_isend_irecv(messages) if messages else []


def _pad_rows(shard: Tensor, longest: int) -> Tensor:
    """`shard`, contiguous, padded with rows of zeros to `longest` rows."""
    if len(shard) == longest:
        return shard.contiguous()
    return torch.cat([shard, shard.new_zeros(longest - len(shard), *shard.shape[1:])])


def _drop_padding(full: Tensor, lengths: Sequence[int]) -> Tensor:
    """`full` without its padding rows."""
    # Equal lengths, the usual case, need no copy.
    longest = max(lengths)
    if min(lengths) == longest:
        return full
    return torch.cat([rows[:length] for rows, length in zip(full.split(longest), lengths, strict=True)])
