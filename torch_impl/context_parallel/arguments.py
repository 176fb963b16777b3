"""What the batches and contexts ask of a mesh, of a batch and of the tensors in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def checked_place(function: str, cp_mesh: DeviceMesh | None) -> tuple[int, int]:
    """How many cp ranks there are, and which of them this one is.

    Errors: TypeError for None and what is no mesh; ValueError for a mesh of several dims.
    """
    if cp_mesh is None:
        raise TypeError(f"{function}: cp_mesh is None; pass the DeviceMesh that cuts the sequence, mesh['cp']")
    if isinstance(cp_mesh, DeviceMesh) and cp_mesh.ndim != 1:
        raise ValueError(
            f"{function}: cp_mesh has {cp_mesh.ndim} dims; pass the one that cuts the sequence, mesh['cp']"
        )
    if not hasattr(cp_mesh, "get_group"):
        kind = type(cp_mesh).__name__
        raise TypeError(f"{function}: cp_mesh is a {kind}; pass the DeviceMesh that cuts the sequence, mesh['cp']")
    return cp_mesh.size(), cp_mesh.get_group().rank()


def check_batch(function: str, batch: Any) -> None:
    """TypeError unless the batch has items by name."""
    if not hasattr(batch, "items"):
        raise TypeError(f"{function}: batch is a {type(batch).__name__}; pass a dict of tensors by name")


def checked_tensor(function: str, name: str, x: Any) -> Tensor:
    """`x` itself; TypeError for what is no Tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{function}: {name} is a {type(x).__name__}; pass a Tensor")
    return x


def names_of(batch: Any) -> str:
    """What a batch has, to be told of."""
    return ", ".join(batch) or "nothing"
