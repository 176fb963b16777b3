"""Tensor-parallel styles of linear layers with an adapter: A, B and the magnitude are sharded with the layer.

    colwise   W "o/tp i"   A "r i tp=R"   B "o/tp r"   m "o/tp"      a rank has its rows of W + s B A
    rowwise   W "o i/tp"   A "r i/tp"     B "o r tp=R" m "o tp=R"    a rank has its columns of W + s B A

The input and the output are sharded as in the layer's own style, with the same collectives: each rank adds its product
with the adapter before the output is sent. The replicated matrix, A or B, has a partial gradient on each rank, which
backward sums over ranks. It has r * i or o * r numbers; the adapter's hidden states would be tokens * r.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from torch_impl.parallelizer.lora import LoRALinear
from torch_impl.parallelizer.tp_styles import LocalForward, placements_of

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude"


def with_adapter(style: ParallelStyle, module: nn.Module) -> ParallelStyle:
    """The style for a module: a LoRA style in place of torch's if the module has an adapter, else `style` itself.

    Errors: ValueError for a style that would shard the adapter otherwise than its layer.
    """
    if not isinstance(module, LoRALinear):
        return style
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        kind = LoRAColwise if isinstance(style, ColwiseParallel) else LoRARowwise
        return kind(style.input_layouts[0], style.output_layouts[0])
    if "packed" in type(style).__name__.lower():
        raise ValueError(
            f"{type(style).__name__} shards halves of a layer, and this one has an adapter; merge it first"
        )
    return style


def module_placements(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    """The placement over tp that a style will give each parameter of a module, its adapter's included.

    Errors: ValueError for a module that the style cannot shard.
    """
    return placements_of(with_adapter(style, module), module)


class _LoRAStyle(LocalForward):
    """The layouts of the layer's input and output, as torch's styles have them."""

    dims: ClassVar[Mapping[str, int | None]]  # of each parameter, the dim that is sharded

    def __init__(self, input_layout: Placement, output_layout: Placement) -> None:
        super().__init__()
        self.input_layout, self.output_layout = input_layout, output_layout

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        dims = {name: self.dims[name] for name, _ in module.named_parameters()}
        return {name: Replicate() if dim is None else Shard(dim) for name, dim in dims.items()}

    def before_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        (x,) = args or kwargs.values()
        placed = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [self.input_layout], run_check=False)
        return (self.local_input(placed),), {}

    def local_input(self, x: DTensor) -> Tensor:
        """The tensor that the layer multiplies on this rank."""
        raise NotImplementedError


class LoRAColwise(_LoRAStyle):
    """`colwise` of a layer with an adapter.

        input  "... i tp=I"   ->   "... o/tp"   or   "... o tp=I", if the layer's style gathers its output

    Cost: as the layer's style; backward also 1 all_reduce of A.
    """

    dims: ClassVar[Mapping[str, int | None]] = {"weight": 0, "bias": 0, A: None, B: 0, MAGNITUDE: 0}

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor | None:
        return with_summed_gradient(parameter) if name == A else super().local_parameter(name, parameter)

    def local_input(self, x: DTensor) -> Tensor:
        # s/tp or tp=I -> tp=R: the gradient is a sum over the ranks' rows of W
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def after_forward(self, module: nn.Module, mesh: DeviceMesh, output: Tensor) -> Tensor:
        if self.output_layout == Shard(-1):
            return output
        # o/tp -> tp=I or s/tp. The shape says that shards may be uneven.
        shape = Size((*output.shape[:-1], cast(int, module.out_features)))
        stride = output.new_empty(shape, device="meta").stride()
        own = DTensor.from_local(output, mesh, [Shard(output.ndim - 1)], run_check=False, shape=shape, stride=stride)
        return own.redistribute(placements=[self.output_layout]).to_local()


class LoRARowwise(_LoRAStyle):
    """`rowwise` of a layer with an adapter.

        input  "... i/tp"   or   "... i tp=I"   ->   "... o tp=I"   or   "... s/tp o", as the layer's style says

    Cost: as the layer's style; backward also 1 all_reduce of B. DoRA: forward also 1 all_reduce of o numbers, backward
          1 of the magnitude.
    """

    dims: ClassVar[Mapping[str, int | None]] = {"weight": 1, "bias": None, A: 1, B: None, MAGNITUDE: None}

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor | None:
        if name == "bias":  # it is added after the sum over ranks
            return None
        return with_summed_gradient(parameter) if name in (B, MAGNITUDE) else super().local_parameter(name, parameter)

    def local_input(self, x: DTensor) -> Tensor:
        return x.redistribute(placements=[Shard(x.ndim - 1)]).to_local()

    def after_forward(self, module: nn.Module, mesh: DeviceMesh, output: Tensor) -> Tensor:
        # tp=P -> tp=I or s/tp
        partial_sum = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        full = partial_sum.redistribute(placements=[self.output_layout]).to_local()
        bias: Any = module._parameters["bias"]
        if bias is None:
            return full
        return full + (bias.to_local() if self.output_layout == Replicate() else with_summed_gradient(bias))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied: Any = super()._apply(module, device_mesh)
        applied.row_group = device_mesh.get_group()
        return applied


def with_summed_gradient(parameter: DTensor) -> Tensor:
    """A replicated parameter, whose gradient is the sum of the ranks' gradients."""
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
