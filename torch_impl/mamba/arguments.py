"""What the mixer and its strategies refuse: sizes that are none, and tensors that are neither rows nor one stream."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor, nn

from torch_impl.layouts.columns import MambaSizes
from torch_impl.layouts.packed import offsets_of


def checked_sizes(function: str, num_heads: int, head_dim: int, n_groups: int, d_state: int) -> MambaSizes:
    """The sizes, each 1 or more, of heads that the groups share equally."""
    named = {"num_heads": num_heads, "head_dim": head_dim, "n_groups": n_groups, "d_state": d_state}
    named = {name: checked_size(function, name, size) for name, size in named.items()}
    if named["num_heads"] % named["n_groups"]:
        raise ValueError(f"mamba.{function}: num_heads={num_heads} must be divisible by n_groups={n_groups}")
    return MambaSizes(**named)


def checked_size(function: str, name: str, size: int) -> int:
    """An integer from 1 on."""
    try:
        size = index(size)
    except TypeError:
        raise TypeError(f"mamba.{function}: {name}={size!r} is a {type(size).__name__}; it is an integer") from None
    if size < 1:
        raise ValueError(f"mamba.{function}: {name}={size} is not a size; it is 1 or more")
    return size


def check_limits(function: str, dt_limit: tuple[float, float], norm_eps: float) -> None:
    low, high = dt_limit
    if not 0 <= low <= high:
        raise ValueError(f"mamba.{function}: dt_limit={dt_limit} is no range of steps; pass 0 <= low <= high")
    if not norm_eps >= 0:
        raise ValueError(f"mamba.{function}: norm_eps={norm_eps} is added to a mean of squares; it is 0 or more")


def check_hidden(function: str, x: Tensor, projection: nn.Module, width: int) -> None:
    """[.., width] in floating point; of the projection's dtype, where nothing casts it on the way there."""
    if not isinstance(x, Tensor):
        raise TypeError(f"mamba.{function}: x is a {type(x).__name__}; pass a Tensor")
    kind = str(x.dtype).removeprefix("torch.")
    if not x.is_floating_point():
        raise TypeError(f"mamba.{function}: x is {kind}; hidden states are floating-point numbers")
    if not x.ndim or x.shape[-1] != width:
        raise ValueError(f"mamba.{function}: x is {list(x.shape)}; d_model={width} is its last dim")
    takes_as_given = type(projection) is nn.Linear and not projection._forward_pre_hooks
    if takes_as_given and x.dtype != projection.weight.dtype and not _autocasts(x.device.type):
        wanted = str(projection.weight.dtype).removeprefix("torch.")
        raise TypeError(f"mamba.{function}: x is {kind}, in_proj.weight is {wanted}; cast one, or use torch.autocast")


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def check_dims(function: str, x: Tensor) -> None:
    """[b, s, w] or [t, w]."""
    if x.ndim not in (2, 3):
        raise ValueError(f"mamba.{function}: input is {list(x.shape)}; it is [b, s, w], or [t, w] with cu_seqlens")


def check_stream(function: str, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """[b, s, w] of whole rows, or one stream, [t, w] or [1, t, w], with the offsets of its sequences."""
    check_dims(function, x)
    if cu_seqlens is None and x.ndim == 2:
        raise ValueError(f"mamba.{function}: input is {list(x.shape)} without cu_seqlens; pass them, or [b, s, w]")
    if cu_seqlens is not None and x.ndim == 3 and len(x) != 1:
        raise ValueError(
            f"mamba.{function}: input is {list(x.shape)} with cu_seqlens; one stream is [t, w] or [1, t, w]"
        )
    if cu_seqlens is not None:
        offsets_of(f"mamba.{function}: cu_seqlens", cu_seqlens)
