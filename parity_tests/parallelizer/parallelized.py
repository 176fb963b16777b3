"""The parallelizer as the tests use it: FSDP2 with the family's own tensor plan where the mesh has an axis for it.

Apart from the tests, since ranks in other processes import it and load no JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_impl.parallelizer import get_hf_tp_shard_plan
from torch_impl.parallelizer.fsdp2 import fsdp2_strategy_parallelize

TENSOR_PARALLEL = {"tp", "tensor_parallel"}


def parallelized(
    policy: MixedPrecisionPolicy | None = None, **switches: Any
) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """A function of a model and a mesh."""

    def parallelize(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        is_cut = TENSOR_PARALLEL & set(device_mesh.mesh_dim_names or ())
        plan: Any = get_hf_tp_shard_plan(model) if is_cut else None
        return fsdp2_strategy_parallelize(model, device_mesh, policy, plan, **switches)

    return parallelize
