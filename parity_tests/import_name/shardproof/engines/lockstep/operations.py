"""Arguments of process group operations, normalised and checked on one rank, and the reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PREMUL_SUM = "PREMUL_SUM"  # NCCL alone has it: each addend times a factor; FSDP2 divides gradients by it
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


def name_of(op: Any) -> str:
    """The name of a reduce op in the ledger, PREMUL_SUM with its factor. Errors: ValueError for an unknown op."""
    kind = getattr(op, "op", op)
    name = getattr(kind, "name", str(kind))
    if name == PREMUL_SUM:
        return f"{name}({float(op.__getstate__()[1])!r})"  # the one place where torch gives the factor
    if name not in _STEPS:
        raise ValueError(f"lockstep: reduce op {name} is not one of {', '.join(_STEPS)}; scale the tensor before")
    return name


def combined(name: str, addends: Sequence[Tensor]) -> Tensor:
    """Reduce the ranks' addends to a new tensor."""
    dtype = addends[0].dtype
    if name.startswith(PREMUL_SUM):
        factor = float(name.removeprefix(f"{PREMUL_SUM}(").removesuffix(")"))
        name, addends = "SUM", [addend * factor for addend in addends]
    step = _STEPS[name]
    if dtype.is_floating_point and dtype.itemsize == 1:  # torch cannot add 8-bit floats
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
    """The name of a reduce op, given directly or in options."""
    return name_of(dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))


def root_place(opts: Any) -> int:
    """The root's place in the group, given directly or in options."""
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)


def rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def uneven_splits(tensor: Tensor, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows sent to and received from each rank in an all_gather of tensors with different sizes."""
    return (rows(tensor),) * len(tensors), tuple(map(rows, tensors))


def size_in_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def splits_of(name: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Rows for each rank; without `splits`, the same number for each."""
    count = rows(tensor)
    if not splits:
        if count % size:
            raise ValueError(f"all_to_all: {name} has {count} rows for {size} ranks (needs a multiple); give splits")
        return [count // size] * size
    if len(splits) != size or sum(splits) != count:
        raise ValueError(f"all_to_all: {name} has {count} rows for {size} ranks, its splits are {list(splits)}")
    return list(splits)


def check_uneven(op: str, tensors: Sequence[Tensor], place: int, size: int, tensor: Tensor) -> None:
    """Check that a list has one tensor per rank, of any shape, and that this rank's part has the shape of `tensor`."""
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
    """Check that a list has one tensor per rank, each with the shape and dtype of `like`, if given."""
    if len(tensors) != size:
        raise ValueError(f"{op}: a list of {len(tensors)} tensors for {size} ranks (needs one for each)")
    for part in tensors:
        if like is not None and (part.shape != like.shape or part.dtype != like.dtype):
            raise ValueError(f"{op}: {described(part)} in the list, {described(like)} beside it (all must be alike)")


def check_full_size(op: str, name: str, full: Tensor, part: Tensor, size: int) -> None:
    """Check that one tensor has room for every rank's part."""
    if full.numel() != part.numel() * size or full.dtype != part.dtype:
        raise ValueError(
            f"{op}: {name} is {described(full)}, a rank's part is {described(part)} "
            f"(needs {size} times its elements, in its dtype)"
        )


def described(tensor: Tensor) -> str:
    """float32[2, 3]"""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
