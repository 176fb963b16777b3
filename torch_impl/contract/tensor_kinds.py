"""Kinds of tensors, process groups, meshes and modules in a signature.

The arguments of a call share `sizes`: the first tensor with a dim sets the dim's size, and every later tensor must
agree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_impl.contract.kinds import DEVICE, GRADIENT, INFERENCE, Instance, ListOf, Sizes, type_name
from torch_impl.contract.rejected import TypeProblem

LEADING = "..."


def dtype_name(x: Tensor) -> str:
    """The dtype of tensor `x` without its package: `float32`."""
    return str(x.dtype).removeprefix("torch.")


def is_integer(x: Tensor) -> bool:
    """Whether the elements of tensor `x` are integers; bools are not integers."""
    dtype = x.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _is_dtensor(x: Tensor) -> bool:
    """Whether x is a DTensor. If its module, which takes a second to import, is not loaded, there are no DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _any_dtype(_: torch.dtype) -> bool:
    return True


def _is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _is_id(dtype: torch.dtype) -> bool:
    return dtype in (torch.int32, torch.int64)


def _is_bool(dtype: torch.dtype) -> bool:
    return dtype == torch.bool


_WITHOUT_ARITHMETIC = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and ((dtype.is_floating_point and dtype.itemsize == 1) or str(dtype)[6:] in ("uint16", "uint32", "uint64"))
)
_DTYPES = {
    "any": (_any_dtype, ""),
    "number": (_any_dtype, ""),
    "floating": (_is_floating, "must be floating"),
    "ids": (_is_id, "ids must be int32 or int64"),
    "integer": (_is_integer, "must be integers"),
    "bool": (_is_bool, "must be bool"),
}


@dataclass(frozen=True)
class TensorKind:
    """A tensor with a spec string: its dims, the mesh axes that shard them, and gradient types of other axes.

    `...` stands for any dims: at the front, at the end, or at both where another argument gives the dim. A dim with the
    same name in two arguments has the same size. A tensor does not show how its dims are sharded, so a value is
    compared with the first spec only.
    """

    spec: str
    dtypes: str = "floating"
    other_specs: tuple[str, ...] = ()  # of other routes: as many dims, sharded otherwise
    dims: tuple[str, ...] = field(init=False)
    has_leading: bool = field(init=False)
    has_trailing: bool = field(init=False)

    def __post_init__(self) -> None:
        # `axis=type` states the gradient type on an axis and is not a dim.
        dims = [word for word in self.spec.split() if "=" not in word]
        if any(len(other.split()) - other.count("=") != len(dims) for other in self.other_specs):
            raise ValueError(f"contract: {self.spec!r} and {self.other_specs} differ in dims; write as many in each")
        object.__setattr__(self, "has_leading", dims[:1] == [LEADING])
        object.__setattr__(self, "has_trailing", dims[1:] != [] and dims[-1] == LEADING)
        object.__setattr__(self, "dims", tuple(dims[self.has_leading : len(dims) - self.has_trailing]))

    def problem_beside(self, name: str, value: Any, sizes: Sizes) -> str | None:
        # 1. The type and the dtype.
        if not isinstance(value, Tensor):
            return TypeProblem(f"{name} is {type_name(value)}; pass a Tensor")
        if type(value) is not Tensor and _is_dtensor(value):
            return TypeProblem(f"{name} is a DTensor; pass {name}.to_local()")
        accepts, rule = _DTYPES[self.dtypes]
        if not accepts(value.dtype):
            subject = "" if self.dtypes == "ids" else "logits " if "logits" in name else "it "
            return TypeProblem(f"{name} is {dtype_name(value)}; {subject}{rule}")
        if self.dtypes != "any" and value.dtype in _WITHOUT_ARITHMETIC:
            return TypeProblem(f"{name} is {dtype_name(value)}, for which torch has few operations; convert it")
        if value.layout is not torch.strided or value.is_nested:
            layout = "nested" if value.is_nested else f"of layout {str(value.layout).removeprefix('torch.')}"
            return TypeProblem(f"{name} is {layout}; pass a dense tensor")
        device, setter = sizes.setdefault(DEVICE, (value.device, name))
        if device != value.device:
            return f"{name} is on {value.device} but {setter} on {device}; pass one device"
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if value.is_inference():
                sizes.setdefault(INFERENCE, (True, name))
            if value.requires_grad:
                sizes.setdefault(GRADIENT, (True, name))
        # 2. The number of dims.
        n_dims = len(self.dims)
        if value.ndim < n_dims or (value.ndim > n_dims and not (self.has_leading or self.has_trailing)):
            return self._problem_of_ndim(name, value)
        if self.has_leading and self.has_trailing:
            return None
        # 3. The leading dims, then each other dim, must agree with earlier arguments.
        shape, first = value.shape, 0 if self.has_trailing else value.ndim - n_dims
        if self.has_leading:
            # The first argument with leading dims sets them; later arguments are compared with it.
            leading, setter = sizes.setdefault(LEADING, (shape[:first], name))
            if leading != shape[:first]:
                advice = self._advice_on_own_dims(value, len(leading))
                return f"{name} is {list(shape)} but {setter} has leading shape {list(leading)}{advice}"
        for i, dim in enumerate(self.dims):
            size, setter = sizes.setdefault(dim, (shape[first + i], name))
            if size != shape[first + i] and dim != "1":
                differing = f"{dim} differs, {shape[first + i]} and {size}"
                return f"{name} is {list(shape)} but {setter} has {dim}={size}: {differing}"
            if dim == "1" and shape[first + i] != 1:
                return f"{name} is {list(shape)}; dim {first + i} must have size 1"
        return None

    def _advice_on_own_dims(self, value: Tensor, leading: int) -> str:
        if self.dims and value.ndim != leading + len(self.dims):
            return f"; it needs {' '.join(self.dims)} after them"
        return ""

    def _problem_of_ndim(self, name: str, value: Tensor) -> str:
        if value.ndim == 0 and self.has_leading and not self.has_trailing:
            last = "the vocabulary" if self.dims[-1].startswith("v") else self.dims[-1]
            return f"{name} has no dims; the last one must be {last}"
        dims = " ".join([LEADING] * self.has_leading + list(self.dims) + [LEADING] * self.has_trailing)
        return f"{name} is {list(value.shape)}; its dims must be [{dims}]; reshape it to these"


_PARALLELISM = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline", "ep": "expert"}


@dataclass(frozen=True)
class GroupKind:
    """A process group of the named mesh axis. None is an error, since torch would take it as the default group."""

    axis: str

    def problem(self, value: Any) -> str | None:
        if isinstance(value, ProcessGroup):
            return None
        parallelism = _PARALLELISM.get(self.axis)
        hint = f" (a group of size 1 for no {parallelism} parallelism)" if parallelism else ""
        return TypeProblem(f" is {type_name(value)}; pass a ProcessGroup{hint}")


class GroupsKind(ListOf):
    """A list of groups to sum over one after the other. No two have more than this rank in common."""

    def problem(self, value: Any) -> str | None:
        """Why a `value` is not such a list; None if it is."""
        problem = super().problem(value)
        if problem is not None:
            return problem
        ranks = [set(dist.get_process_group_ranks(group)) for group in value]
        for (i, first), (j, second) in combinations(enumerate(ranks), 2):
            if len(first & second) > 1:
                both = ", ".join(map(str, sorted(first & second)))
                return f"[{i}] and [{j}] both have the ranks {both}, which would count twice; pass one of them"
        return None


@dataclass(frozen=True)
class DeviceKind:
    """A device, or its name or number."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (torch.device, str, int)):
            return TypeProblem(f" is {type_name(value)}; pass a torch.device")
        try:
            torch.device(value)
        except RuntimeError:
            return f"={value!r} is no device here; pass a torch.device, such as torch.device('cpu')"
        return None


@dataclass(frozen=True)
class _TensorAnnotation:
    """Implements `Sharded[Tensor, "b s v/tp"]` for one class of dtypes; several specs are alternative routes."""

    dtypes: str

    def __getitem__(self, item: tuple[Any, ...]) -> Any:
        return Annotated[item[0], TensorKind(item[1], self.dtypes, item[2:])]


class _GroupAnnotation:
    """Implements the annotation `Group[ProcessGroup, "tp"]`."""

    def __getitem__(self, item: tuple[Any, str]) -> Any:
        return Annotated[item[0], GroupKind(item[1])]


if TYPE_CHECKING:
    # A type checker sees only the first item: a Tensor, a ProcessGroup.
    from typing import Annotated as Group
    from typing import Annotated as Sharded
    from typing import Annotated as ShardedAny
    from typing import Annotated as ShardedBool
    from typing import Annotated as ShardedIds
    from typing import Annotated as ShardedInt
    from typing import Annotated as ShardedNumber
else:
    Group = _GroupAnnotation()
    Sharded = _TensorAnnotation("floating")
    ShardedIds = _TensorAnnotation("ids")
    ShardedInt = _TensorAnnotation("integer")
    ShardedBool = _TensorAnnotation("bool")
    ShardedAny = _TensorAnnotation("any")
    ShardedNumber = _TensorAnnotation("number")  # of any dtype in which torch can add

Tensors = Annotated[list[Tensor], ListOf(Instance(Tensor, "pass a Tensor", shows_value=False), "tensors")]
Groups = Annotated[
    list[ProcessGroup], GroupsKind(Instance(ProcessGroup, "pass a ProcessGroup", shows_value=False), "process groups")
]
Module = Annotated[nn.Module, Instance(nn.Module, "pass a torch.nn.Module", shows_value=False)]
Dtype = Annotated[torch.dtype, Instance(torch.dtype, "pass a torch.dtype")]
Device = Annotated[torch.device | str, DeviceKind()]
Mesh = Annotated[DeviceMesh, Instance(DeviceMesh, "pass a torch DeviceMesh", shows_value=False)]
