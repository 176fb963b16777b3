"""The range of vocabulary ids of each rank: shards are contiguous, in rank order, and may differ in width.

Public functions state a range in their signatures by the kinds `VocabStart` and `VocabEnd`. For a DTensor the range
follows from its mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives.plain import all_gather_stack
from torch_impl.contract import Number, Rejected, Sizes, sentence_about
from torch_impl.layouts.index_arrays import ceil_bound
from torch_impl.vocab_parallel.statistics import has_full_rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

IGNORED_ID = -100  # an id outside every vocabulary, as in torch's cross_entropy


@dataclass(frozen=True)
class _RangeStart:
    """The first id of this rank's columns."""

    def problem_beside(self, name: str, value: Any, sizes: Sizes) -> str | None:
        sizes["vocab_start_index"] = (value, name)
        return sentence_about(name, Number(integer=True).problem(value))


@dataclass(frozen=True)
class _RangeEnd:
    """The end of this rank's range, one past its last id. The range must fit the shard, an earlier argument."""

    def problem_beside(self, name: str, value: Any, sizes: Sizes) -> str | None:
        if (problem := Number(integer=True).problem(value)) is not None:
            return sentence_about(name, problem)
        if "vocab_start_index" not in sizes:
            return f"vocab_start_index=None but {name}={value}; pass both, or neither to count ids in rank order"
        # The arguments to the left have stored the range's start and the width of the shard.
        start, (columns, shard) = sizes["vocab_start_index"][0], sizes.get("v/tp", (value, ""))
        vocab_range = f"vocab range [{start}, {value})"
        if start < 0:
            return f"{vocab_range} starts below 0; vocab_start_index is its first id"
        if value < start:
            return f"{vocab_range} is reversed; {name} is one past its last id"
        if value - start > columns:
            noun = "rows" if "weight" in shard else "columns"
            return f"{vocab_range} has {value - start} ids but {shard} has {columns} {noun}"
        return None


VocabStart = Annotated[int, _RangeStart()]
VocabEnd = Annotated[int, _RangeEnd()]
ChunkSize = Annotated[int, Number(1, integer=True, remedy=", or None for automatic blocks")]


def all_gather_range(width: int, group: ProcessGroup, device: torch.device) -> tuple[int, int]:
    """[start, end) of this rank's ids, from the widths of all ranks.

    One all_gather of one int64 and one host read; neither in a group of one.
    """
    start, end, _ = all_gather_range_and_size(width, group, device)
    return start, end


def all_gather_range_and_size(width: int, group: ProcessGroup, device: torch.device) -> tuple[int, int, int]:
    """`all_gather_range`, and the number of ids on all ranks together."""
    # Shards may differ in width, so every rank needs the widths of the ranks before it.
    widths = all_gather_widths(width, group, device)
    end = sum(widths[: group.rank() + 1])
    return end - width, end, sum(widths)


def all_gather_widths(width: int, group: ProcessGroup, device: torch.device) -> list[int]:
    """The number of columns of each rank. One all_gather of one int64, one host read; neither in a group of one."""
    if has_full_rows(group):
        return [width]
    return all_gather_stack(torch.tensor(width, device=device), group).tolist()


def stated_or_counted_range(logits: Tensor, group: ProcessGroup, start: int | None, end: int | None) -> tuple[int, int]:
    """The given range, or without one this rank's ids counted in rank order, by one all_gather of the widths.

    Errors: ValueError for a range without its end.
    """
    if start is not None and end is None:
        raise Rejected(
            f"vocab_start_index={start} but vocab_end_index=None; pass both, or neither to count ids in rank order"
        )
    return all_gather_range(logits.shape[-1], group, logits.device) if start is None or end is None else (start, end)


def ceil_range(size: int, world: int, rank: int) -> tuple[int, int]:
    """[start, end) of one rank's ids by DTensor's rule: blocks of ceil(size / world) until the ids are used up.

    >>> [ceil_range(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    return ceil_bound(size, world, rank), ceil_bound(size, world, rank + 1)


def dtensor_range(logits: DTensor) -> tuple[ProcessGroup, int, int]:
    """The group of the mesh dim `tp`, which shards the vocabulary, and [start, end) of this rank's ids."""
    mesh = logits.device_mesh
    tp = (mesh.mesh_dim_names or ()).index("tp")
    return mesh.get_group("tp"), *ceil_range(logits.shape[-1], mesh.size(tp), mesh.get_local_rank(tp))


def why_not_sharded_over_tp(name: str, logits: DTensor) -> str | None:
    """Why logits are not sharded by vocabulary over the mesh dim `tp` and at most by sequence over `cp`, or None."""
    axes, vocab = logits.device_mesh.mesh_dim_names or (), logits.ndim - 1
    if "tp" not in axes:
        return (
            f"{name} has no mesh dim 'tp' (mesh dims: {', '.join(axes) or 'unnamed'}); "
            "name the one that shards the vocabulary 'tp'"
        )
    placement = logits.placements[axes.index("tp")]
    if not placement.is_shard(vocab):
        return f"{name} is {_placement_text(placement)} over tp; redistribute to Shard(-1)"
    return why_not_sharded_by(name, logits, {"cp": 1, "tp": vocab})


def why_not_sharded_by(name: str, x: DTensor, dims: dict[str, int]) -> str | None:
    """Why the placements of x are not allowed, or None: a mesh dim in `dims` may only shard that dim of x.

    Any other mesh dim may only shard the batch.
    """
    names = x.device_mesh.mesh_dim_names
    for number, placement in enumerate(x.placements):
        # A mesh dim that `dims` does not name may shard the batch, dim 0.
        axis = names[number] if names else f"dim {number} of a mesh without names"
        dim = dims.get(axis, 0)
        if not (placement.is_replicate() or placement.is_shard(dim)):
            remedy = "redistribute" if names else "pass mesh_dim_names to the mesh, or redistribute"
            return f"{name} is {_placement_text(placement)} over {axis}; {remedy} to Shard({dim}) or Replicate"
    return None


def why_not_rank(rank: int | None, group: ProcessGroup | None) -> str | None:
    """Why `rank` is not this rank in the group, or None; without a group it must be 0."""
    # The group already knows the rank; the argument only confirms that the caller means the same group.
    if group is None:
        return f"vocab_parallel_rank={rank} but vocab_parallel_group is None; pass both" if rank else None
    if rank is None:
        return "vocab_parallel_rank is None but vocab_parallel_group is given; pass both"
    if rank != group.rank():
        return f"vocab_parallel_rank={rank} but this is rank {group.rank()} of vocab_parallel_group"
    return None


def _placement_text(placement: Any) -> str:
    return repr(placement).removesuffix("()")
