"""What the mixer and its strategies refuse: sizes that are none, and tensors that are neither rows nor one stream."""

from __future__ import annotations

from operator import index

from torch import Tensor, nn

from torch_impl.layouts.columns import MambaSizes
from torch_impl.layouts.divisibility import offsets_of


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


def check_hidden(function: str, x: Tensor, width: int) -> None:
    """[.., width] in floating point."""
    if not isinstance(x, Tensor):
        raise TypeError(f"mamba.{function}: x is a {type(x).__name__}; pass a Tensor")
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"mamba.{function}: x is {kind}; hidden states are floating-point numbers")
    if not x.ndim or x.shape[-1] != width:
        raise ValueError(f"mamba.{function}: x is {list(x.shape)}; d_model={width} is its last dim")


def projected(function: str, projection: nn.Module, x: Tensor) -> Tensor:
    """What the projection gives. TypeError for an x of another dtype that nothing on the way there casts."""
    try:
        return projection(x)
    except RuntimeError as error:
        dtype = getattr(getattr(projection, "weight", None), "dtype", x.dtype)
        if dtype == x.dtype or "dtype" not in str(error):
            raise
        kind, wanted = (str(each).removeprefix("torch.") for each in (x.dtype, dtype))
        said = f"x is {kind}, in_proj.weight is {wanted}; cast one, or use torch.autocast"
        raise TypeError(f"mamba.{function}: {said}") from error


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
