"""Watch any running code: the ledger of the calling rank, with the module of each collective."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardproof.engines import module_path
from shardproof.engines.ledger import Ledger, LedgerRow
from shardproof.engines.lockstep import world
from shardproof.engines.module_path import ModulePath
from shardproof.engines.processes.recorder import Recorder, issue


@contextmanager
def watch(mesh: Any = None) -> Iterator[Ledger]:
    """Record every collective and message that this rank issues inside the block: `with watch(mesh) as ledger:`.

    The code runs unchanged: torch.distributed, DTensor, FSDP2 or DDP, forward and backward, on gloo, NCCL or any other
    backend, and inside a rank of `shardproof.run`. The ledger fills while the block runs and stays afterwards. Each row
    has the operation, its group, shapes, dtypes, bytes, `phase` (fwd or bwd), the line that called it and the calling
    module, as `Model.layers.0.up`. The ledger covers one rank; watching issues no collective, and needs neither JAX nor
    the rest of the harness. `ledger_table(ledger)` sums it by module; `ledger_figure(ledger)` draws it.

    `mesh`, a DeviceMesh, gives the default group the name of the axis that spans it; other groups of a mesh have the
    names of their axes. An operation that the ledger does not know still runs, with a warning that names it.

    Errors: TypeError if `mesh` is not a mesh.
    """
    axes, ledger = _axes(mesh), Ledger()
    rank = world.current()
    with module_path.opened() as path:
        if rank is None:
            with _Watch(ledger, axes, path):
                yield ledger
            return

        def add(row: LedgerRow) -> None:
            ledger.rows.append(replace(row, module=path.here()))

        rank.listeners.append(add)
        try:
            yield ledger
        finally:
            rank.listeners.remove(add)


def _axes(mesh: Any) -> dict[str, int]:
    device_mesh = getattr(mesh, "device_mesh", mesh)  # a rank of shardproof.run has a view of a mesh
    if device_mesh is None:
        return {}
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"watch: mesh is a {type(mesh).__name__}; pass a DeviceMesh, or nothing")
    return dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=False))


class _Watch(Recorder):
    """A recorder that keeps no handle and no tensor of the watched code alive."""

    supports_higher_order_operators = True

    def __init__(self, ledger: Ledger, axes: Mapping[str, int], path: ModulePath) -> None:
        super().__init__(axes=axes)
        self.rows, self._path = ledger.rows, path

    def _run(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        try:
            self.rows.append(replace(self._row(issue(func, args, kwargs)), module=self._path.here()))
        except NotImplementedError as unknown:
            warnings.warn(f"watch: {unknown}", stacklevel=2)
        return func(*args, **kwargs)
