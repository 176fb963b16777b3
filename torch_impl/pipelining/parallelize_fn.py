"""What is called for each part of a model, to shard it inside its stage."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class ParallelizeFnProtocol(Protocol):
    """Works in place and returns None, or returns a module that takes the part's place."""

    def __call__(
        self,
        model: nn.Module,
        world_mesh: DeviceMesh,
        moe_mesh: DeviceMesh,
        *,
        dp_axis_names: tuple[str, ...],
        cp_axis_name: str | None = None,
        tp_axis_name: str | None = None,
        ep_axis_name: str | None = None,
        ep_shard_axis_names: tuple[str, ...] | None = None,
    ) -> Any: ...
