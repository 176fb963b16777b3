"""The parameters that a strategy reads from its mixer whenever it uses them."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor, nn

from torch_impl.layouts.columns import MambaSizes


def check_parameters(function: str, mixer: nn.Module, sizes: MambaSizes) -> None:
    """The mixer has those parameters, of these sizes along their first dim."""
    heads = (sizes.num_heads,)
    wanted = {
        "conv1d.weight": (sizes.channels,),
        "conv1d.bias": (sizes.channels,),
        "dt_bias": heads,
        "A_log": heads,
        "D": (sizes.num_heads, sizes.inner),
    }
    for name, fitting in wanted.items():
        try:
            parameter = attrgetter(name)(mixer)
        except AttributeError:
            raise ValueError(f"mamba.{function}: the mixer has no {name}") from None
        if parameter is not None and parameter.shape[0] not in fitting:
            size = " or ".join(map(str, dict.fromkeys(fitting)))
            raise ValueError(f"mamba.{function}: {name} is {list(parameter.shape)}; these sizes give it {size} rows")


def whole(function: str, mixer: nn.Module, name: str) -> Tensor:
    """The parameter as it is now; the local tensor of a DTensor that is whole on each rank."""
    from torch.distributed.tensor import DTensor

    parameter = attrgetter(name)(mixer)
    if not isinstance(parameter, DTensor):
        return parameter
    if not all(placement.is_replicate() for placement in parameter.placements):
        raise ValueError(f"mamba.{function}: {name} is {parameter.placements}; unshard it first")
    return parameter.to_local()
