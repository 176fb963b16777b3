"""Low-rank adapters of linear layers: their construction, their forward, and their merge into the weight.

    y = x (W + s B A)^T + bias,   s = alpha / rank        DoRA:   y = x (c (W + s B A))^T + bias,   c = m / |W + s B A|

W and bias are frozen; A [rank, i] and B [o, rank] are trained, and m [o] with DoRA. |.| is the norm of each row, which
is a constant in backward. An adapted layer keeps the names of its weight and bias; the adapter has the names
`lora_A.weight`, `lora_B.weight` and `lora_magnitude`. `fsdp2_strategy_parallelize` shards adapted layers by the styles
of their layers: see `lora_styles`.

Source: arXiv 2106.09685 (LoRA), 2402.09353 (DoRA, whose norm has no gradient by its section 4.3).
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import all_reduce_sum
from torch_impl.contract import Instance, ListOf, Module, Positive, PositiveInt, Rejected, contract
from torch_impl.parallelizer.adapters.to_cpu import full_value
from torch_impl.parallelizer.module_names import names_of, nearest_names

Targets = Annotated[
    list[str], ListOf(Instance(str, "pass a str"), "names of modules", "pass the names of linear layers")
]


class LoRALinear(nn.Linear):
    """A linear layer with an adapter of `rank` columns, which `add_lora` puts in the place of the nn.Linear `linear`.

        x  "... i"   ->   "... o"

    The adapter adds alpha / rank * B A to the weight; `dora` adds a magnitude for each row.

    `row_group` is the group of ranks that have other columns of W and A; a row's norm sums squares over it. A style
    sets it. `base` is the weight without its adapter while the adapter is merged.

    Cost:   the linear layer's, and the products with A and B. DoRA: W + s B A in memory in each forward, and 1
            all_reduce of o numbers with a `row_group`.
    Errors: torch's, for an x of another width.
    """

    lora_magnitude: nn.Parameter | None

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, *, dora: bool) -> None:
        nn.Module.__init__(self)  # the parameters are the layer's own, and no others are allocated
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        of_weight = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False, **of_weight)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False, **of_weight)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank
        self.row_group: ProcessGroup | None = None
        self.base: Tensor | None = None
        # B is 0 now: with the weight's row norms as magnitudes, the adapted layer computes the same as the layer.
        norms = nn.Parameter(self.row_norms().to(linear.weight.dtype)) if dora else None
        self.register_parameter("lora_magnitude", norms)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        if self.base is not None:
            return F.linear(input, self.weight, self.bias)
        y = F.linear(input, self.weight)
        y = y + self.scaling * F.linear(F.linear(input, self.lora_A.weight), self.lora_B.weight)
        if self.lora_magnitude is not None:
            y = y * (self.lora_magnitude / self.row_norms().to(y.dtype))
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """The norms of this rank's rows of W + s B A, over all columns; in float32 or wider.

        Cost: 1 all_reduce of a number for each of this rank's rows, with a `row_group`.
        """
        squares = adapted(self.weight, self.lora_A.weight, self.lora_B.weight, self.scaling).square().sum(1)
        return (squares if self.row_group is None else all_reduce_sum(squares, self.row_group)).sqrt()


@contract
def add_lora(model: Module, targets: Targets, *, rank: PositiveInt, alpha: Positive, dora: bool = False) -> nn.Module:
    """Give the linear layers that `targets` name an adapter, and freeze every other parameter. Returns the model.

    `targets` are names of modules, with * for any part as in a tensor-parallel plan: `layers.*.self_attn.q_proj`. The
    model computes the same as before, since B is 0; A is drawn from torch's generator, so give all ranks one seed.
    Call it before the model is parallelized. `dora` adds a magnitude for each row.

    Cost:   no collective.
    Errors: TypeError for an argument of a wrong type; ValueError for a target that matches nothing or no `nn.Linear`,
            a layer that is sharded or has an adapter, a `rank` below 1 and an `alpha` that is not positive. Nothing is
            changed then.
    """
    modules, chosen = dict(model.named_modules()), dict[str, nn.Linear]()
    linear_layers = [name for name, module in modules.items() if name and type(module) is nn.Linear]
    for target in targets:
        names = names_of(target, modules)
        if not names:
            raise Rejected(
                f"targets has {target!r}, which matches no module; nearest: {nearest_names(target, linear_layers)}"
            )
        for name in names:
            module = modules[name]
            if isinstance(module, LoRALinear):
                raise Rejected(f"targets has {target!r}, and {name!r} has an adapter; name each layer once")
            if type(module) is not nn.Linear or not name:
                raise Rejected(
                    f"targets has {target!r}, and {name!r} is {type(module).__name__}; name nn.Linear layers; nearest: "
                    f"{nearest_names(target, linear_layers)}"
                )
            if isinstance(module.weight, DTensor):
                raise Rejected(f"targets has {target!r}, and {name!r} is sharded; add adapters first, then parallelize")
            chosen[name] = module
    model.requires_grad_(False)
    for name, module in chosen.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, LoRALinear(module, rank, alpha, dora=dora))
    return model


@contract
def merge_lora(model: Module) -> nn.Module:
    """Write W + s B A, with DoRA its rescaled rows, into the weight of each adapted layer. Returns the model.

    The layers then compute with the weight alone. The sum is taken in float32 or wider and rounded once. Each rank
    keeps a copy of its shard of the weight for `unmerge_lora`. Layers that are merged already are left as they are.

    Cost:   for a sharded layer, the gathers of the full W, A, B and m, one layer at a time; all ranks must call this.
    Errors: TypeError if model is not a Module; ValueError for a model without an adapter.
    """
    for layer in _adapted_layers(model):
        if layer.base is not None:
            continue
        with torch.no_grad():
            weight, a, b = (full_value(x) for x in (layer.weight, layer.lora_A.weight, layer.lora_B.weight))
            merged = adapted(weight, a, b, layer.scaling)
            if layer.lora_magnitude is not None:
                norms = merged.square().sum(1).sqrt()
                merged = merged * (full_value(layer.lora_magnitude) / norms)[:, None]
            layer.base = _local(layer.weight).clone()
            _local(layer.weight).copy_(_shard_like(layer.weight, merged.to(weight.dtype)))
    return model


@contract
def unmerge_lora(model: Module) -> nn.Module:
    """Write the weight as it was before `merge_lora` back into each adapted layer, to the bit. Returns the model.

    Cost:   no collective.
    Errors: TypeError if model is not a Module; ValueError for a model without an adapter.
    """
    for layer in _adapted_layers(model):
        if layer.base is not None:
            with torch.no_grad():
                _local(layer.weight).copy_(layer.base)
            layer.base = None
    return model


def adapted(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + s B A, in float32 or wider."""
    wide = accumulator(weight.dtype)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scaling)


def _adapted_layers(model: nn.Module) -> list[LoRALinear]:
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    if not layers:
        raise Rejected(f"model is a {type(model).__name__} without an adapter; call add_lora first")
    return layers


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _shard_like(parameter: Tensor, full: Tensor) -> Tensor:
    """This rank's shard of a full value, placed as the parameter is; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
