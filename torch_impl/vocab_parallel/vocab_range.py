"""Which ids a rank owns: shards are contiguous in rank order and may differ in width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from torch_impl.collectives.plain import gathered
from torch_impl.layouts.index_arrays import ceil_bound
from torch_impl.vocab_parallel.arguments import checked_tp_group

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


NO_ID = -100  # an id that no rank owns


def gathered_range(width: int, group: ProcessGroup, device: torch.device) -> tuple[int, int]:
    """[start, end) of this rank's ids, from the widths of all ranks. One all_gather of one int64, one host read."""
    start, end, _ = gathered_range_and_size(width, group, device)
    return start, end


def gathered_range_and_size(width: int, group: ProcessGroup, device: torch.device) -> tuple[int, int, int]:
    """`gathered_range`, and how many ids all ranks own together."""
    own = torch.tensor([width], device=device)
    ends = gathered(own, group, 0, [1] * group.size()).cumsum(0).tolist()
    end = ends[group.rank()]
    return end - width, end, ends[-1]


def ceil_range(size: int, world: int, rank: int) -> tuple[int, int]:
    """[start, end) of one rank's ids by DTensor's rule: blocks of ceil(size / world) while they last.

    >>> [ceil_range(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    return ceil_bound(size, world, rank), ceil_bound(size, world, rank + 1)


def range_of_dtensor(function: str, name: str, logits: DTensor) -> tuple[ProcessGroup, int, int]:
    """The group of the mesh dim `tp`, which cuts the vocabulary, and [start, end) of this rank's ids."""
    mesh, vocab = logits.device_mesh, logits.ndim - 1
    axes = mesh.mesh_dim_names or ()
    if "tp" not in axes:
        raise ValueError(
            f"{function}: {name} has no mesh dim 'tp' (mesh dims: {', '.join(axes) or 'unnamed'}); "
            "name the one that cuts the vocabulary 'tp'"
        )
    tp = axes.index("tp")
    if not logits.placements[tp].is_shard(vocab):
        said = repr(logits.placements[tp]).removesuffix("()")
        raise ValueError(f"{function}: {name} is {said} over tp; redistribute to Shard(-1)")
    start, end = ceil_range(logits.shape[-1], mesh.size(tp), mesh.get_local_rank(tp))
    return mesh.get_group("tp"), start, end


def check_own_rank(function: str, rank: int | None, group: ProcessGroup | None) -> None:
    """The rank that was given is this rank's own in the group; without one there is no rank but 0."""
    if group is None:
        if rank:
            raise ValueError(f"{function}: vocab_parallel_rank={rank} but vocab_parallel_group is None; pass both")
        return
    group = checked_tp_group(function, "vocab_parallel_group", group)
    if rank is None:
        raise ValueError(f"{function}: vocab_parallel_rank is None but vocab_parallel_group is given; pass both")
    if rank != group.rank():
        raise ValueError(
            f"{function}: vocab_parallel_rank={rank} but this is rank {group.rank()} of vocab_parallel_group"
        )


def check_placements(function: str, name: str, x: DTensor, cuts: dict[str, int]) -> None:
    """Each named mesh dim cuts its own dim or nothing, every other, those without a name too, the batch or nothing."""
    names = x.device_mesh.mesh_dim_names
    for number, placement in enumerate(x.placements):
        axis = names[number] if names else f"dim {number} of a mesh without names"
        dim = cuts.get(axis, 0)
        if not (placement.is_replicate() or placement.is_shard(dim)):
            said = repr(placement).removesuffix("()")
            remedy = "redistribute" if names else "pass mesh_dim_names to the mesh, or redistribute"
            raise ValueError(f"{function}: {name} is {said} over {axis}; {remedy} to Shard({dim}) or Replicate")
