"""Styles of async tensor parallelism: a layer's products overlap with the gather and the scatter of its sequence.

A layer of column-wise modules and a row-wise one at its end takes and returns this rank's positions. One ring gathers
its input for all its column-wise modules, while each block that has arrived is multiplied (`all_gather_linear`); the
row-wise product is summed and scattered by another ring (`linear_reduce_scatter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from torch_impl.parallelizer._torch_compat import local_parameter, not_compiled
from torch_impl.parallelizer.async_linear import all_gather_linears, linear_reduce_scatter
from torch_impl.parallelizer.head_styles import ReplicatedHeads
from torch_impl.parallelizer.tp_plan import PlanEntry
from torch_impl.parallelizer.tp_styles import LocalForward, ReplicatedOnShards

SEQUENCE = 1  # the dim of positions


class LayerInput:
    """The input of a layer, "b s/tp d", and its products with the layer's column-wise modules, from one ring."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.products: dict[nn.Module, Tensor] = {}
        self.shard: DTensor | None = None

    @not_compiled  # a compiled block is cut here, since the compiler does not trace a ring
    def multiply(self, x: Tensor, mesh: DeviceMesh) -> DTensor:
        """Run the ring; returns x as a DTensor, which has the size of the full sequence."""
        weights = [local_parameter(module.get_parameter("weight")) for module in self.modules]  # pyright: ignore[reportArgumentType]
        self.products = dict(zip(self.modules, _products(x, weights, mesh), strict=True))
        self.shard = DTensor.from_local(x, mesh, [Shard(SEQUENCE)], run_check=False)
        return self.shard

    def product(self, module: nn.Module, x: DTensor) -> Tensor | None:
        """The product of a module with `x`, once; None if x is not the layer's input as it came."""
        return self.products.pop(module, None) if x is self.shard else None

    def clear(self, *_: Any) -> None:
        self.products, self.shard = {}, None


class AsyncColwise(LocalForward):
    """A column-wise module at the beginning of a layer.

        input  "... s/tp i"   weight  "o/tp i"   bias  "o/tp"   ->   "... s o/tp"

    Cost: none if the input is the layer's; else as `all_gather_linear`.
    """

    def __init__(self, layer_input: LayerInput) -> None:
        super().__init__()
        self.layer_input = layer_input

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: Shard(0) for name, _ in module.named_parameters()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied = super()._apply(module, device_mesh)
        self.layer_input.modules.append(module)
        applied.forward = partial(self._product, applied, device_mesh)
        return applied

    @not_compiled
    def _product(self, module: Any, mesh: DeviceMesh, x: DTensor) -> Tensor:
        y = self.layer_input.product(module, x)
        if y is None:
            (y,) = _products(x.to_local(), [module.weight], mesh)
        return y if module.bias is None else y + module.bias


class AsyncRowwise(LocalForward):
    """The row-wise module at the end of a layer.

        input  "... s i/tp"   weight  "o i/tp"   bias  "o tp=R"   ->   "... s/tp o"

    Cost: as `linear_reduce_scatter`; backward 1 all_reduce of the bias.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: Shard(1) if name == "weight" else Replicate() for name, _ in module.named_parameters()}

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor | None:
        if name == "weight":
            return super().local_parameter(name, parameter)
        # Each rank adds the bias to its own positions.
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied = super()._apply(module, device_mesh)
        applied.forward = partial(_scattered_product, applied, device_mesh)
        return applied


def async_entries(path: str, layer: nn.Module, styles: Mapping[str, PlanEntry], last: str) -> dict[str, PlanEntry]:
    """The entries of a layer's column-wise modules and of its row-wise module `last`, for rings; {} if it has others.

    Norms of a rank's heads and heads that ranks replicate may stand beside them. Layers with adapters have no rings.
    """
    inside = {name: entry for name, entry in styles.items() if name.startswith(f"{path}.")}
    columns = [name for name, entry in inside.items() if _is_colwise(entry.style)]
    modules = [layer.get_submodule(name[len(path) + 1 :]) for name in (*columns, last)]
    others = [inside[name].style for name in inside if name not in columns and name != last]
    if not columns or not all(type(module) is nn.Linear for module in modules):
        return {}
    if not all(isinstance(style, ReplicatedOnShards | ReplicatedHeads) for style in others):
        return {}
    shared = LayerInput()
    entries = {name: PlanEntry(inside[name].key, AsyncColwise(shared)) for name in columns}
    return {**entries, last: PlanEntry(inside[last].key, AsyncRowwise())}


def _is_colwise(style: Any) -> bool:
    if type(style) is not ColwiseParallel:
        return False
    return style.input_layouts == (Replicate(),) and style.output_layouts == (Shard(-1),)


def _products(x: Tensor, weights: list[Tensor], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    group = mesh.get_group()
    return all_gather_linears(x, weights, group, [x.shape[SEQUENCE]] * group.size())


@not_compiled
def _scattered_product(module: Any, mesh: DeviceMesh, x: Tensor) -> Tensor:
    y = linear_reduce_scatter(x, module.weight, mesh.get_group())
    return y if module.bias is None else y + module.bias
