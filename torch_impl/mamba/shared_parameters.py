"""The parameters that a strategy reads from its mixer whenever it uses them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor, nn

from torch_impl.layouts.columns import MambaSizes


def check_parameters(function: str, mixer: nn.Module, sizes: MambaSizes) -> None:
    """The mixer has those parameters, of the shapes that these sizes give, and no other sizes of its own."""
    heads, channels = sizes.num_heads, sizes.channels
    wanted = {
        "conv1d.weight": ((channels, 1, "k"),),
        "conv1d.bias": ((channels,),),
        "dt_bias": ((heads,),),
        "A_log": ((heads,),),
        "D": ((heads,), (sizes.inner,), (heads, sizes.head_dim)),
    }
    for name, shapes in wanted.items():
        try:
            parameter = attrgetter(name)(mixer)
        except AttributeError:
            raise ValueError(f"mamba.{function}: the mixer has no {name}") from None
        if parameter is not None and not any(_fits(parameter.shape, shape) for shape in shapes):
            told = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in dict.fromkeys(shapes))
            raise ValueError(f"mamba.{function}: {name} is {list(parameter.shape)}; these sizes give it {told}")
    own = getattr(mixer, "sizes", sizes)
    if isinstance(own, MambaSizes) and own != sizes:
        raise ValueError(f"mamba.{function}: the mixer has {_told(own)}; {_told(sizes)} are given")


def _fits(shape: Sequence[int], wanted: Sequence[int | str]) -> bool:
    return len(shape) == len(wanted) and all(size in (held, "k") for held, size in zip(shape, wanted, strict=True))


def _told(sizes: MambaSizes) -> str:
    return f"n_groups={sizes.n_groups} and d_state={sizes.d_state}"


def whole(function: str, mixer: nn.Module, name: str) -> Tensor:
    """The parameter as it is now; the local tensor of a DTensor that is whole on each rank."""
    from torch.distributed.tensor import DTensor

    parameter = attrgetter(name)(mixer)
    if not isinstance(parameter, DTensor):
        return parameter
    if not all(placement.is_replicate() for placement in parameter.placements):
        raise ValueError(f"mamba.{function}: {name} is {parameter.placements}; unshard it first")
    return parameter.to_local()
