"""Copy a tensor to the CPU, with its full value if it is distributed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torch_impl.contract import Rejected, contract
from torch_impl.parallelizer._torch_compat import parts_as_shards
from torch_impl.parallelizer.tp_styles import is_shard_of_parts, sharded_dim

DEVICES = ("cuda", "cpu")


@contract
def to_cpu(v: Any, *, local: bool = False) -> Any:
    """Move v to the CPU: a DTensor's full value for any placements; other values than tensors are returned unchanged.

        DTensor  any placements   ->   "..." the same on each rank of its mesh, detached

    With `local=True`, this rank's shard of a DTensor. A Tensor that is on the CPU is returned as the same object. Lists
    and dicts are not traversed.

    Cost:   for a DTensor 1 all_gather for each axis that shards it and 1 all_reduce for each with partial sums; all
            ranks of its mesh call this. None with `local=True`.
    Errors: ValueError for a DTensor on another device than cuda or cpu, or for `local=True` of partial sums.
    """
    if not isinstance(v, Tensor):
        return v
    if not isinstance(v, DTensor):
        return v.cpu()
    if v.device.type not in DEVICES:
        reason = ", which has no values" if v.device.type == "meta" else f"; only {' and '.join(DEVICES)} are supported"
        raise Rejected(f"v is a DTensor on {v.device.type!r}{reason}")
    if not local:
        with torch.no_grad():
            # Detach the result, so that no backward has to communicate.
            return full_value(v).cpu()
    if any(placement.is_partial() for placement in v.placements):
        raise Rejected(f"v is {v.placements}, so that a rank has a partial sum and no shard; drop local=True")
    with torch.no_grad():
        return v.to_local().cpu()


def full_value(v: Tensor) -> Tensor:
    """A DTensor's full value on its device; a Tensor is returned as the same object."""
    return _with_full_halves(v).full_tensor() if isinstance(v, DTensor) else v


def _with_full_halves(v: DTensor) -> DTensor:
    """Gather the halves of a dim first, if other axes shard other dims.

    torch 2.13's `full_tensor` has no order of axes if one of them shards halves: it raises for experts sharded over dp,
    ep and tp. Without halves it has an order.
    """
    v = parts_as_shards(v)
    dims = [sharded_dim(placement)[0] for placement in v.placements]
    alone = [is_shard_of_parts(each) and dims.count(dim) == 1 for each, dim in zip(v.placements, dims, strict=True)]
    if not any(alone) or len(dims) - dims.count(None) == 1:
        return v
    placements = [Replicate() if is_alone else each for is_alone, each in zip(alone, v.placements, strict=True)]
    return v.redistribute(placements=placements)
