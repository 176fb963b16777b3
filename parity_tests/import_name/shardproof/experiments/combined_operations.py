"""Run a function with the ranks' results of some operations combined, as if each had seen the whole of its input.

A mean, a maximum, a logsumexp or a running sum of each rank's own part is the usual slip. The mode here replaces its
result by the result of all ranks of an axis, so that a run shows whether that is all that is wrong.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardproof.engines.ledger import base, is_plumbing

# The operations that say how the ranks' results are combined; after any other one, a sum is tried.
STATISTICS: dict[str, tuple[str, ...]] = {
    "maximum": ("amax", "max", "cummax", "relu", "maximum"),
    "mean": ("mean", "nanmean"),
    "variance": ("var", "std"),
    "logsumexp": ("logsumexp",),
    "softmax": ("softmax", "log_softmax"),
    "norm": ("norm", "vector_norm"),
    "running sum": ("cumsum",),
    "bounded sum": ("clamp", "clamp_min"),
}
OPERATORS = {"__rdiv__": "div", "__rpow__": "pow", "__iadd__": "add_", "__isub__": "sub_"}  # with names as methods
SUM, BOUNDED = "sum", "bounded sum"
HOW_OF = {name: how for how, names in STATISTICS.items() for name in names}
SUMS = ("sum", "nansum", "count_nonzero", "bincount", "einsum", "matmul", "mm", "bmm", "linear", "dot")
COUNTS = ("sum", "nansum", "count_nonzero")
ASSIGNMENT = "__setitem__"
WRITES = {"scatter": "scatter_add", "scatter_": "scatter_add_", "index_copy": "index_add", "index_copy_": "index_add_"}
WRITES[ASSIGNMENT] = "index_put_"


@dataclass(frozen=True)
class Operation:
    """The calls of one torch function that a user's line makes; with `call`, only the call that is written so.

    `way` is how the ranks' results are combined, where that is not the function's own.
    """

    name: str
    source: str
    call: str = ""
    way: str = field(default="", compare=False)

    @property
    def of_line(self) -> Operation:
        """All calls of the function in the line."""
        return replace(self, call="")

    @property
    def how(self) -> str:
        """How the ranks' results of it make the result of all: by their sum, their maximum, ..."""
        return self.way or HOW_OF.get(self.name, SUM)


class Mode(TorchFunctionMode):
    """Calls `run` for each torch function that a user's line calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").removeprefix("linalg_")
        name = OPERATORS.get(name, name)
        if name.startswith("__") and name not in WRITES:
            return func(*args, **(kwargs or {}))
        return self.run(func, Operation(name, *_place()), args, dict(kwargs or {}))

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Recorder(Mode):
    """Notes the operations of rank 0 that return a new tensor of numbers, and which of them reduce."""

    def __init__(self, operations: dict[Operation, bool]) -> None:
        super().__init__()
        self._operations = operations

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        parts = args[0] if args and isinstance(args[0], list | tuple) else ()  # of `torch.cat`
        first = next((arg for arg in (*args, *parts) if isinstance(arg, Tensor)), None)
        value = value_of(result)
        if dist.get_rank() or not operation.source or first is None:
            return result
        if operation.name in WRITES:
            if operation.name != ASSIGNMENT or _places(args[1]):
                self._operations[operation.of_line] = False
        elif operation.how == BOUNDED and (len(args) > 2 or "max" in kwargs):  # which is no floor of a count
            return result
        elif value is not None and not (value._is_view() or value is first or operation.name.endswith("_")):
            is_reduction = operation.name in (*HOW_OF, *SUMS) or value.numel() < first.numel()
            self._operations.setdefault(operation, is_reduction)
        return result


class Writer(Mode):
    """Adds where an operation writes, into zeros."""

    def __init__(self, edited: Operation) -> None:
        super().__init__()
        self._edited = edited

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation.of_line != self._edited:
            return func(*args, **kwargs)
        if operation.name != ASSIGNMENT:
            return getattr(args[0], WRITES[operation.name])(*args[1:], **kwargs)
        x, places, value = args[:3]
        if _places(places):
            value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
            return x.index_put_(_places(places), value, accumulate=True)
        return func(*args, **kwargs)


class Combiner(Mode):
    """Combines the ranks' results of some operations, each in its own way; `sums_gradients` is a sum's backward.

    With `of_equal_ranks` it takes this rank's result for the result of every rank. A run that this mends lacks a
    factor, and not the parts of other ranks.
    """

    def __init__(
        self, edited: Sequence[Operation], group: Any, *, sums_gradients: bool, of_equal_ranks: bool = False
    ) -> None:
        super().__init__()
        self._edited, self._group, self._sums_gradients = edited, group, sums_gradients
        self._of_equal_ranks = of_equal_ranks
        self._ways: dict[str, Callable[[Tensor], Tensor]] = {
            "maximum": self._maximum,
            "mean": self._mean,
            "logsumexp": self._logsumexp,
            "norm": lambda value: self._sum(value**2).sqrt(),
            SUM: self._sum,
        }

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        how = next((each.how for each in self._edited if each in (operation, operation.of_line)), None)
        if how is None:
            return func(*args, **kwargs)
        if operation.how == BOUNDED:
            total = func(self._sum(args[0]), *args[1:], **kwargs)
            return total if how == BOUNDED else total / dist.get_world_size(self._group)
        result = func(*args, **kwargs)
        value = value_of(result)
        if value is None:
            return result
        if how == "variance":
            return self._variance(func, args, kwargs)
        if how in self._ways:
            combined = self._ways[how](value)
        else:
            dim = kwargs["dim"] if "dim" in kwargs else args[1]
            combined = self._along(how, value, args[0], dim, is_log="log" in operation.name)
        return combined if value is result else type(result)((combined, *result[1:]))

    def _sum(self, value: Tensor) -> Tensor:
        if self._of_equal_ranks:
            multiple = value * dist.get_world_size(self._group)
            return multiple if self._sums_gradients else value + (multiple - value).detach()
        return _Sum.apply(value, self._group, self._sums_gradients)

    def _mean(self, value: Tensor) -> Tensor:
        return self._sum(value) / dist.get_world_size(self._group)

    def _greatest(self, value: Tensor) -> Tensor:
        total = value.detach().clone(memory_format=torch.contiguous_format)
        if not self._of_equal_ranks:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self._group)
        return total

    def _maximum(self, value: Tensor) -> Tensor:
        total = self._greatest(value)
        greatest = torch.where(value.detach() == total, value, total)
        if not self._sums_gradients:
            return greatest
        if self._of_equal_ranks:
            return greatest + (dist.get_world_size(self._group) - 1) * (greatest - greatest.detach())
        return _SumOfGradients.apply(greatest, self._group)

    def _logsumexp(self, value: Tensor) -> Tensor:
        shift = self._greatest(value).nan_to_num(neginf=0.0)
        return self._sum((value - shift).exp()).log() + shift

    def _along(self, how: str, value: Tensor, x: Tensor, dim: int, *, is_log: bool) -> Tensor:
        """A softmax or a running sum along a dim that the ranks share, with the parts of the other ranks."""
        if how == "softmax":
            own = x.logsumexp(dim, keepdim=True)
            lost = own - self._logsumexp(own)
            return value + lost if is_log else value * lost.exp()
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        last = value.narrow(dim, -1, 1)
        is_own = torch.arange(ranks).reshape(-1, *[1] * last.dim()) == rank
        totals = self._sum(torch.where(is_own, last, torch.zeros_like(last)))
        return value + totals[:rank].sum(0)

    def _variance(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The variance about the mean of all ranks, with the divisor of each rank's own."""
        x, *rest = args
        dims = rest[0] if rest and not isinstance(rest[0], bool) else kwargs.get("dim")
        shift = x.mean(dims, keepdim=True) - self._mean(x.mean(dims, keepdim=True))
        local = func(*args, **kwargs)
        is_root = func.__name__ == "std"
        total = self._mean((local**2 if is_root else local) + shift.reshape(local.shape) ** 2)
        return total.sqrt() if is_root else total


class _Sum(torch.autograd.Function):
    """The sum over a group by a plain collective, so that no collective under test judges an edit.

    Backward sums the ranks' gradients if they are addends; equal ones pass as they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sums_gradients: bool) -> Tensor:
        ctx.group, ctx.sums_gradients = group, sums_gradients
        wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        total = x.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(cotangent, ctx.group, True) if ctx.sums_gradients else cotangent, None, None


class _SumOfGradients(torch.autograd.Function):
    """The same number on each rank, which read it for parts of one result. Backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(cotangent, ctx.group, True), None


def _places(index: Any) -> tuple[Tensor, ...]:
    """The tensors of ids that index the leading dims; empty if a slice, a number or a mask does."""
    parts = index if isinstance(index, tuple) else (index,)
    are_ids = all(isinstance(part, Tensor) and part.dtype == torch.int64 and part.dim() for part in parts)
    return tuple(parts) if are_ids else ()


def value_of(result: Any) -> Tensor | None:
    """The tensor of numbers that an operation returns: `values` of a maximum along a dim."""
    first: Any = result[0] if isinstance(result, tuple) and result else result
    is_plain = type(first) in (Tensor, torch.nn.Parameter)
    return first if is_plain and first.dtype != torch.bool else None


def _place() -> tuple[str, str]:
    """file:line of the user's call, the innermost frame outside torch, Python and the harness; the call as written."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if not is_plumbing(code.co_filename):
            positions = next(islice(code.co_positions(), frame.f_lasti // 2, None))
            return f"{base(code.co_filename)}:{line}", _written(code.co_filename, *positions)
    return "", ""


def _written(file: str, line: int | None, last: int | None, start: int | None, end: int | None) -> str:
    """The text of an expression that stands in one line."""
    if line is None or line != last or start is None:
        return ""
    return linecache.getline(file, line).encode()[start:end].decode()
