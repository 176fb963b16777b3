"""Masks over a tensor by what an id input says there: whose shard the id lies in, and whether it is a shard's border.

A vocab-parallel mistake is often right for most targets and wrong for those of one rank, or of one column.
"""

from __future__ import annotations

import numpy as np

from parity_tests.harness.declare.argument import Argument
from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.declare.spec import Spec
from parity_tests.harness.judge.compare import TensorRow, owners
from parity_tests.harness.run.program import Program


def id_marks(scheme: Declared, program: Program, case: CaseSpec, row: TensorRow) -> dict[str, np.ndarray]:
    """Name -> mask, for every id input whose dims lead this tensor's."""
    found: dict[str, np.ndarray] = {}
    for arg in scheme.inputs:
        how = scheme.draws[arg.name]
        names = arg.spec.dim_names
        if how.kind != "ids" or how.dim is None or row.argument.spec.dim_names[: len(names)] != names:
            continue
        for text, mask in _marked(scheme, case, how.dim, program.whole(arg, case)).items():
            padded = mask.reshape(mask.shape + (1,) * (row.want.ndim - mask.ndim))
            found[f"positions whose {arg.name} {text}"] = np.broadcast_to(padded, row.want.shape)
    return found


def _marked(scheme: Declared, case: CaseSpec, dim: str, ids: np.ndarray) -> dict[str, np.ndarray]:
    size = case.dims[dim]
    masks = {"is owned by nobody": (ids < 0) | (ids >= size)}
    for axis, owner in _owners_of(scheme, case, dim).items():
        change = np.flatnonzero(np.diff(owner)) + 1
        masks["is the first id of a shard"] = np.isin(ids, np.append(change, 0))
        masks["is the last id of a shard"] = np.isin(ids, np.append(change, size) - 1)
        inside = np.where((ids >= 0) & (ids < size), ids, 0)
        for rank in range(case.mesh[axis]):
            masks[f"belongs to {axis} rank {rank}"] = (owner[inside] == rank) & ~masks["is owned by nobody"]
    return {text: mask for text, mask in masks.items() if mask.any()}


def _owners_of(scheme: Declared, case: CaseSpec, dim: str) -> dict[str, np.ndarray]:
    """For each axis that cuts a dim: which of its coordinates holds each position, by the first spec that cuts it."""
    for arg in (*scheme.inputs, *scheme.outputs):
        for part in arg.spec.dims:
            if part.name == dim and part.cuts:
                return owners(Argument(dim, Spec((part,))), case, scheme.layouts)
    return {}
