"""Operations of a process group: their arguments in one form, checked for what one rank can see, and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def name_of(op: object) -> str:
    """The name of a reduce op, as the ledger writes it; ValueError for one that no CPU backend has."""
    kind = getattr(op, "op", op)
    name = getattr(kind, "name", str(kind))
    if name not in _STEPS:
        raise ValueError(f"lockstep: reduce op {name} is not one of {', '.join(_STEPS)}; scale the tensor before")
    return name


def combined(name: str, addends: Sequence[Tensor]) -> Tensor:
    """One new tensor from the ranks' addends."""
    dtype = addends[0].dtype
    step = _STEPS[name]
    if dtype.is_floating_point and dtype.itemsize == 1:  # torch adds no 8-bit floats
        total = reduce(lambda a, b: step(a.float(), b.float()).to(dtype), addends)
        return (total.float() / len(addends)).to(dtype) if name == "AVG" else total.clone()
    total = reduce(step, addends[1:], addends[0].clone())
    if name != "AVG":
        return total
    if dtype == torch.bool:
        raise TypeError("lockstep: AVG of torch.bool has no meaning; use SUM, which is logical or")
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return torch.div(total, len(addends), rounding_mode="trunc" if is_integer else None)


def listed(tensors: Any) -> list[Tensor]:
    """A tensor or a list of tensors, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(tensors: Any) -> list[list[Tensor]]:
    """A list of tensors or a list of lists, as a list of lists."""
    if tensors and isinstance(tensors[0], Tensor):
        return [list(tensors)]
    return [list(line) for line in tensors]


def reduce_op(opts: Any) -> str:
    """The name of the reduce op in options, or given by itself."""
    return name_of(dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))


def root_place(opts: Any) -> int:
    """The root's place in the group, in options or given by itself."""
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)


def rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def uneven_splits(tensor: Tensor, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows to and from each rank, where an all_gather of a list has tensors of unlike sizes."""
    return (rows(tensor),) * len(tensors), tuple(map(rows, tensors))


def size_in_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def splits_of(name: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Rows for each rank; no splits mean equal ones."""
    count = rows(tensor)
    if not splits:
        if count % size:
            raise ValueError(f"all_to_all: {name} has {count} rows for {size} ranks (needs a multiple); give splits")
        return [count // size] * size
    if len(splits) != size or sum(splits) != count:
        raise ValueError(f"all_to_all: {name} has {count} rows for {size} ranks, its splits are {list(splits)}")
    return list(splits)


def check_uneven(op: str, tensors: Sequence[Tensor], place: int, size: int, tensor: Tensor) -> None:
    """A list has one tensor for each rank, of any sizes, this rank's like the one beside it."""
    check_one_each(op, tensors, size)
    for part in tensors:
        if part.dtype != tensor.dtype:
            raise ValueError(
                f"{op}: {described(part)} in the list, {described(tensor)} beside it (dtypes must be alike)"
            )
    if tensors[place].shape != tensor.shape:
        raise ValueError(
            f"{op}: {described(tensors[place])} in this rank's place of the list, {described(tensor)} beside it"
        )


def check_one_each(op: str, tensors: Sequence[Tensor], size: int, like: Tensor | None = None) -> None:
    """A list has one tensor for each rank, all like the one beside it."""
    if len(tensors) != size:
        raise ValueError(f"{op}: a list of {len(tensors)} tensors for {size} ranks (needs one for each)")
    for part in tensors:
        if like is not None and (part.shape != like.shape or part.dtype != like.dtype):
            raise ValueError(f"{op}: {described(part)} in the list, {described(like)} beside it (all must be alike)")


def check_full_size(op: str, name: str, full: Tensor, part: Tensor, size: int) -> None:
    """One tensor that holds every rank's part."""
    if full.numel() != part.numel() * size or full.dtype != part.dtype:
        raise ValueError(
            f"{op}: {name} is {described(full)}, a rank's part is {described(part)} "
            f"(needs {size} times its elements, in its dtype)"
        )


def described(tensor: Tensor) -> str:
    """float32[2, 3]"""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
