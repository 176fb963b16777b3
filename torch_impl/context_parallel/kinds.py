"""Argument kinds in this component's contracts: a batch, the mesh of cp, a layout, a window, a scale."""

from __future__ import annotations

import math
from numbers import Real
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.contract import Instance, Number, OneOf, Rejected, TypeProblem, type_name
from torch_impl.layouts.token_layout import TokenLayout

# Messages list them in this order.
EXCHANGES = ("ring", "all_gather", "ulysses", "usp")
ORDERS = ("contiguous", "dual_chunk_swap", "striped")


class _Batch:
    """A dict of tensors by name."""

    def problem(self, value: Any) -> str | None:
        # Check the method and not the class: BatchEncoding and TensorDict are mappings of tensors, but not dicts.
        if hasattr(value, "items"):
            return None
        return TypeProblem(f" is {type_name(value)}; pass a dict of tensors by name")


class _SeqDims:
    """A dict from names of entries to dims."""

    def problem(self, value: Any) -> str | None:
        is_dims = isinstance(value, dict) and all(isinstance(dim, int) for dim in value.values())
        if is_dims and not any(isinstance(dim, bool) for dim in value.values()):
            return None
        return TypeProblem(f"={value!r}; pass a dict of the sequence's dim by name of an entry")


class _Fills:
    """A dict from names of entries to numbers."""

    def problem(self, value: Any) -> str | None:
        # Whether an entry's dtype can represent its number is checked with the entry.
        return (
            None if isinstance(value, dict) else TypeProblem(f"={value!r}; pass a dict of a number by name of an entry")
        )


class _CpMesh:
    """The 1-D mesh of cp, or an object with its group."""

    def problem(self, value: Any) -> str | None:
        # Check the method and not the class: any object with `size` and `get_group` is accepted.
        remedy = "pass the DeviceMesh that shards the sequence, mesh['cp']"
        if isinstance(value, DeviceMesh) and value.ndim != 1:
            return f" has {value.ndim} dims; {remedy}"
        return None if hasattr(value, "get_group") else TypeProblem(f" is {type_name(value)}; {remedy}")


class _NamedMesh:
    """A mesh; its dims may have names."""

    def problem(self, value: Any) -> str | None:
        if hasattr(value, "mesh_dim_names"):
            return None
        return TypeProblem(f" is {type_name(value)}; pass a DeviceMesh with a dim named cp, or None")


class _Scale:
    """A positive and finite factor of the scores."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, Real):
            return TypeProblem(f" is {type_name(value)}; pass a float, or None for p ** -0.5")
        if not 0 < float(value) < math.inf:
            return f"={value} must be positive and finite; negate q for a negative scale"
        return None


class _Layout:
    """A TokenLayout, or the name of an order."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, TokenLayout | str):
            return None
        return TypeProblem(f" is {type_name(value)}; pass a TokenLayout, or one of {', '.join(ORDERS)}")


Batch = Annotated[dict[str, Any], _Batch()]
SeqDims = Annotated[dict[str, int], _SeqDims()]
Fills = Annotated[dict[str, float | int], _Fills()]
OneTensor = Annotated[Tensor, Instance(Tensor, "pass a Tensor", shows_value=False)]
CpMesh = Annotated[DeviceMesh, _CpMesh()]
NamedMesh = Annotated[DeviceMesh, _NamedMesh()]
# A query sees positions at a distance below the window: with causal attention that many keys, itself included.
Window = Annotated[int, Number(1, integer=True, remedy=", or None to see all")]
Scale = Annotated[float, _Scale()]
Layout = Annotated[TokenLayout | str, _Layout()]
ExchangeName = Annotated[str, OneOf(EXCHANGES)]


def require_tensor(name: str, x: Any) -> Tensor:
    """Return `x`, an entry of a batch; rejected unless it is a Tensor."""
    if not isinstance(x, torch.Tensor):
        raise Rejected(f"{name} is {type_name(x)}; pass a Tensor", TypeError)
    return x
