"""Checks of a tensor that a function returns, before its numbers are read."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.declare.declared import Argument
from shardproof.engines.failure import RankFault

SUMMED = "P"


def check_placements(part: Any, arg: Argument, axes: tuple[str, ...], who: str) -> None:
    """Raise RankFault if a DTensor's placement on an axis of several ranks contradicts the output's spec.

    Axes that are missing or unnamed in the DTensor's mesh are not checked.
    """
    names = part.device_mesh.mesh_dim_names or ()
    for index, (axis, placement) in enumerate(zip(names, part.placements, strict=False)):
        if axis not in axes or part.device_mesh.size(index) == 1:
            continue
        sharded = [place for place, dim in enumerate(arg.spec.dims) if axis in [each.axis for each in dim.shardings]]
        if placement.is_partial():
            agrees = arg.spec.type_of(axis) == SUMMED
        elif placement.is_replicate():
            agrees = not sharded and arg.spec.type_of(axis) != SUMMED
        else:
            agrees = getattr(placement, "dim", None) in sharded
        if not agrees:
            wanted = _placement_text(sharded, arg.spec.type_of(axis))
            raise RankFault(
                f"{who} returned a DTensor for '{arg.name}' that is {placement!r} over {axis}; '{arg.spec}' says "
                f"{wanted}: redistribute it, or correct the spec"
            )


def _placement_text(sharded: list[int], letter: str) -> str:
    return f"Shard({sharded[0]})" if sharded else "Partial()" if letter == SUMMED else "Replicate()"


def check_storage(part: torch.Tensor, what: str) -> None:
    """Raise RankFault if a tensor's storage is too short: it was freed or resized, and a read would crash."""
    if not part.numel():
        return
    last = part.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)
    )
    needed, has = (last + 1) * part.element_size(), part.untyped_storage().nbytes()
    if has < needed:
        size = f"needs {needed} bytes of a storage that has {has}"
        raise RankFault(f"{what}, which {size}: it was freed or resized; return a copy that owns its storage")
