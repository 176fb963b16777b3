"""What the batches and contexts ask of a mesh: its size, and this rank's place in its group."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def checked_place(function: str, cp_mesh: DeviceMesh | None) -> tuple[int, int]:
    """How many cp ranks there are, and which of them this one is.

    Errors: TypeError for None; ValueError for a mesh of several dims.
    """
    if cp_mesh is None:
        raise TypeError(f"{function}: cp_mesh is None; pass the DeviceMesh that cuts the sequence, mesh['cp']")
    if isinstance(cp_mesh, DeviceMesh) and cp_mesh.ndim != 1:
        raise ValueError(
            f"{function}: cp_mesh has {cp_mesh.ndim} dims; pass the one that cuts the sequence, mesh['cp']"
        )
    return cp_mesh.size(), cp_mesh.get_group().rank()
