"""Styles for projections to heads that are not three separate Linear layers with enough heads for all ranks.

A transformers Conv1D, as in GPT-2, is a linear layer with a transposed weight [in, out]; its projection to heads has
q, k and v one after the other in one weight. If there are fewer key and value heads than ranks, all ranks have the full
projections, and each computes only the head that its queries attend to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_impl.parallelizer.tp_styles import (
    LocalForward,
    ReplicatedOnShards,
    shard_of_parts,
    sum_gradient,
    sum_over_ranks,
)

QKV = 3


class Conv1DColwise(LocalForward):
    """`conv1d_colwise`: a Conv1D whose output columns are sharded.

        input  "... i tp=I"   weight  "i o/tp"   bias  "o/tp"   ->   "... o/tp"

    Cost: backward 1 all_reduce of the input's gradient.
    """

    parts = 1

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        _check_conv1d("conv1d_colwise", module)
        return {"weight": Shard(1), "bias": Shard(0)}

    def before_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        x, *rest = args
        return (sum_gradient(x, mesh), *rest), kwargs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied: Any = super()._apply(module, device_mesh)
        # The forward of a Conv1D reads its output width from this attribute, not from the weight.
        applied.nf = applied.weight.to_local().shape[1]
        return applied


class Conv1DPackedColwise(Conv1DColwise):
    """`conv1d_packed_colwise`: q, k and v in one Conv1D; this rank has its own heads of each.

        input  "... i tp=I"   weight  "i o", "o" = q | k | v, each /tp   bias  "o tp=R"   ->   "... o", each part /tp

    The weight's full value has the original order of columns. The bias is replicated, because FSDP shards its only dim
    and would reassemble the thirds in another order; each rank reads its part, and the gradient is summed.

    Cost: backward 1 all_reduce of the input's gradient and 1 of the bias's.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        _check_conv1d("conv1d_packed_colwise", module)
        if module.get_parameter("bias").numel() % QKV:
            raise ValueError(f"conv1d_packed_colwise: nf={module.nf} has no {QKV} equal parts")
        return {"weight": shard_of_parts(1, QKV), "bias": Replicate()}

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        if name == "weight":
            return parameter.to_local()
        full = _with_summed_gradient(parameter).view(QKV, -1)
        # tp=R -> o/tp: the columns of this rank in each of q, k and v
        return full.chunk(parameter.device_mesh.size(), 1)[parameter.device_mesh.get_local_rank()].reshape(-1)

    def local_sizes(self, parent: nn.Module, ranks: int) -> dict[str, int]:
        # GPT-2's attention splits the output by this width into q, k and v.
        return {"split_size": parent.split_size // ranks} if hasattr(parent, "split_size") else {}  # pyright: ignore


class Conv1DRowwise(LocalForward):
    """`conv1d_rowwise`: a Conv1D whose input is sharded; the bias is added once.

        input  "... i/tp"   weight  "i/tp o"   bias  "o tp=I"   ->   "... o tp=I"

    Cost: forward 1 all_reduce of the output.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        _check_conv1d("conv1d_rowwise", module)
        return {"weight": Shard(0), "bias": Replicate()}

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        local = parameter.to_local()
        # A Conv1D always adds a bias: make it zeros here, and add the real bias after the sum over ranks.
        return torch.zeros_like(local) if name == "bias" else local

    def after_forward(self, module: nn.Module, mesh: DeviceMesh, output: Any) -> Any:
        return sum_over_ranks(output, mesh) + _to_local(module._parameters["bias"])


class PerHead(LocalForward):
    """`per_head`: parameters of attention itself with one row for each head, such as gpt-oss's sinks.

        input, output   as the module has them   parameters  "h/tp ..."

    A rank has the rows of its heads, and computes their gradients from these heads alone.

    Cost: none.
    """

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}


class ReplicatedHeads(ReplicatedOnShards):
    """`colwise` for keys or values with fewer heads than ranks: a rank computes the head that its queries attend to.

        input  "... i tp=I"   weight  "g*p i tp=R"   bias  "g*p tp=R"   ->   "... p", head rank * g / tp of g

    Consecutive ranks have the same head, and each computes the gradient from its own queries: the sum over all ranks is
    the gradient of every head. Parameters are not sharded over tp, as state dicts show; FSDP shards them.

    `heads` is g, which divides the number of ranks; `groups` is the number of a rank's query heads, over which
    attention repeats the rank's one key and value head.

    Cost: backward 1 all_reduce of the input's gradient and 1 of each parameter.
    """

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups

    def local_parameter(self, name: str, parameter: DTensor) -> Tensor:
        mesh, full = parameter.device_mesh, super().local_parameter(name, parameter)
        if name == "lora_A.weight":  # the adapter's rows of heads are those of B
            return full
        return full.chunk(self.heads)[mesh.get_local_rank() * self.heads // mesh.size()]

    def before_forward(
        self, module: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        x, *rest = args
        return (sum_gradient(x, mesh), *rest), kwargs

    def local_sizes(self, parent: nn.Module, ranks: int) -> dict[str, int]:
        return {GROUPS: self.groups}


GROUPS = "num_key_value_groups"  # attribute of transformers' attention: query heads per key and value head


def _check_conv1d(style: str, module: nn.Module) -> None:
    """ValueError unless the module is a transformers Conv1D. transformers need not be installed."""
    if type(module).__name__ != "Conv1D" or set(dict(module.named_parameters())) != {"weight", "bias"}:
        raise ValueError(f"{style}: shards a Conv1D of transformers, not a {type(module).__name__}")


def _with_summed_gradient(parameter: DTensor) -> Tensor:
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _to_local(parameter: Tensor | None) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
