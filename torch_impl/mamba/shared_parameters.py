"""The parameters that a strategy reads from its mixer whenever it uses them."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor, nn

from torch_impl.layouts.columns import MambaSizes


def check_parameters(function: str, mixer: nn.Module, sizes: MambaSizes) -> None:
    """The mixer has those parameters, of the shapes that these sizes give, and no other sizes of its own."""
    heads, channels = sizes.num_heads, sizes.channels
    shapes = {
        "conv1d.weight": (f"[{channels}, 1, k]", lambda p: p.shape[:-1] in ((channels,), (channels, 1))),
        "conv1d.bias": (f"[{channels}]", lambda p: p.shape == (channels,)),
        "dt_bias": (f"[{heads}]", lambda p: p.shape == (heads,)),
        "A_log": (f"[{heads}]", lambda p: p.shape == (heads,)),
        "D": (f"[{heads}] or [{sizes.inner}]", lambda p: _by_head(p, sizes)),
    }
    for name, (told, fits) in shapes.items():
        try:
            parameter = attrgetter(name)(mixer)
        except AttributeError:
            raise ValueError(f"mamba.{function}: the mixer has no {name}") from None
        if parameter is None and name != "conv1d.bias":
            raise ValueError(f"mamba.{function}: the mixer's {name} is None")
        if parameter is not None and not fits(parameter):
            raise ValueError(f"mamba.{function}: {name} is {list(parameter.shape)}; these sizes give it {told}")
    own = getattr(mixer, "sizes", sizes)
    if isinstance(own, MambaSizes) and own != sizes:
        raise ValueError(f"mamba.{function}: the mixer has {_told(own)}; {_told(sizes)} are given")


def _by_head(D: Tensor, sizes: MambaSizes) -> bool:
    """One number for each head or each of its channels, heads first, in however many dims."""
    counts = (sizes.num_heads, sizes.inner)
    return D.ndim > 0 and D.shape[0] in counts and D.numel() in counts and D.numel() >= D.shape[0]


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
