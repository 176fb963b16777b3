"""A spec as DTensor placements, where DTensor can say it."""

from __future__ import annotations

from typing import Any

from parity_tests.harness.declare.spec import Spec


def placements(spec: Spec, axes: tuple[str, ...]) -> tuple[Any, ...]:
    """One placement for each mesh axis: Shard(dim), Partial() for P, Replicate() for R and I.

    Errors: ValueError, `not expressible: ...`, for an order that is a permutation, or a dim cut twice against
    the order of the mesh.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    found: dict[str, Any] = {axis: Partial() if letter == "P" else Replicate() for axis, letter in spec.types}
    for index, dim in enumerate(spec.dims):
        order = [axes.index(cut.axis) for cut in dim.cuts]
        if order != sorted(order):
            raise ValueError(f"not expressible: {dim} is cut against the order of the mesh ({', '.join(axes)})")
        for cut in dim.cuts:
            if cut.layout == "ragged":
                raise ValueError("not expressible: ragged lengths are free, DTensor's follow its ceil rule")
            if cut.layout != "contiguous":
                raise ValueError(f"not expressible: {cut.layout} is a permutation")
            found[cut.axis] = Shard(index)
    return tuple(found.get(axis, Replicate()) for axis in axes)
