"""What the functions of this folder refuse before they send anything.

Each check names the function and the argument, says what it was, and what to pass instead. None reads a
value on the device: shapes, dtypes and settings decide.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_group


def checked_tp_group(function: str, name: str, group: object) -> ProcessGroup:
    """`group` itself, a ProcessGroup."""
    return checked_group(function, name, group, " (a group of size 1 for no tensor parallelism)")


def check_logits(function: str, name: str, logits: Tensor) -> None:
    """Logits are floating and have a last dim, the vocabulary."""
    if not logits.dtype.is_floating_point:
        raise TypeError(f"{function}: {name} is {dtype_name(logits)}; logits must be floating")
    if logits.ndim == 0:
        raise ValueError(f"{function}: {name} has no dims; the last one must be the vocabulary")


def check_ids(function: str, name: str, ids: Tensor) -> None:
    """Token ids are int32 or int64."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: {name} is {dtype_name(ids)}; token ids must be int64")


def check_leading(
    function: str, name: str, shape: tuple[int, ...], logits_name: str, logits: Tensor, several: bool = False
) -> None:
    """One entry for each row of the logits, or several along a last dim of their own."""
    leading = list(shape)[:-1] if several else list(shape)
    if leading != list(logits.shape[:-1]) or (several and not shape):
        wanted = "; its last dim must hold the k ids of each row" if several and len(shape) != logits.ndim else ""
        raise ValueError(
            f"{function}: {name} is {list(shape)} but {logits_name} has leading shape {list(logits.shape[:-1])}{wanted}"
        )


def check_range(function: str, start: int, end: int, logits_name: str, logits: Tensor) -> None:
    """The ids [start, end) of this rank fit the columns of its shard."""
    if start < 0:
        raise ValueError(f"{function}: vocab range [{start}, {end}) starts below 0")
    if end < start:
        raise ValueError(f"{function}: vocab range [{start}, {end}) is reversed")
    if end - start > logits.shape[-1]:
        raise ValueError(
            f"{function}: vocab range [{start}, {end}) has {end - start} ids "
            f"but {logits_name} has {logits.shape[-1]} columns"
        )


def check_chunk_size(function: str, chunk_size: int | None) -> None:
    """A chunk has at least one position."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{function}: chunk_size={chunk_size} must be at least 1, or None for automatic blocks")


def check_temperature(function: str, temperature: float) -> None:
    """A temperature is positive."""
    if not temperature > 0:
        raise ValueError(f"{function}: temperature={temperature} must be positive")


def check_overwritable(function: str, name: str, logits: Tensor) -> None:
    """A gradient can be written over logits whose elements each have a place of their own."""
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            f"{function}: inplace_gradient=True writes over {name}, but they are expanded and share memory; "
            f"pass {name}.contiguous() or inplace_gradient=False"
        )


def dtype_name(x: Tensor) -> str:
    """As a message has it: `float32`."""
    return str(x.dtype).removeprefix("torch.")
