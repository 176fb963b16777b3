"""Checks that a collective's signature cannot state: a valid dim of the tensor, and a length for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import Rejected


def dim_from_front(name: str, dim: int, x: Tensor) -> int:
    """`dim` counted from the front. Errors: ValueError if x has no such dim."""
    if not -x.ndim <= dim < x.ndim:
        raise Rejected(f"{name}={dim} is outside a tensor of {x.ndim} dims")
    return dim % x.ndim


def lengths_of_ranks(name: str, lengths: Sequence[int], group: ProcessGroup) -> list[int]:
    """`lengths` as a list. Errors: ValueError unless there is one length, an integer of 0 or more, for each rank."""
    try:
        lengths = [index(length) for length in lengths]
    except TypeError:
        raise Rejected(f"{name}={lengths!r} has an entry that is no integer") from None
    if len(lengths) != group.size():
        raise Rejected(f"{name}={lengths} has {len(lengths)} entries for {group.size()} ranks")
    if min(lengths) < 0:
        raise Rejected(f"{name}={lengths} has a negative entry")
    return lengths


def lengths_to_gather(name: str, lengths: Sequence[int] | None, x: Tensor, dim: int, group: ProcessGroup) -> list[int]:
    """The length of each rank's shard along `dim`; x is this rank's shard, and None means equal shards."""
    size, rank = x.shape[dim], group.rank()
    if lengths is None:
        return [size] * group.size()
    # A rank can compare only its own entry with a tensor; comparing the others would take a collective.
    lengths = lengths_of_ranks(name, lengths, group)
    if lengths[rank] != size:
        raise Rejected(f"{name}[{rank}]={lengths[rank]} but x has {size} positions along dim {dim}")
    return lengths


def lengths_to_scatter(name: str, lengths: Sequence[int] | None, x: Tensor, dim: int, group: ProcessGroup) -> list[int]:
    """The length of the shard of x along `dim` for each rank; None means equal shards."""
    size, world = x.shape[dim], group.size()
    if lengths is None:
        if size % world:
            raise Rejected(f"dim {dim} has {size} positions, which {world} ranks cannot share equally; pass {name}")
        return [size // world] * world
    # x contains the shards of all ranks, so their lengths must add up to its size.
    lengths = lengths_of_ranks(name, lengths, group)
    if sum(lengths) != size:
        raise Rejected(f"{name}={lengths} add up to {sum(lengths)} but dim {dim} has {size} positions")
    return lengths
