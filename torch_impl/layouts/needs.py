"""Which sizes a layout can cut, and the sentence that refuses the others, from sizes alone on every rank."""

from numbers import Integral

import torch
from torch import Tensor

PIECES_PER_RANK = {"contiguous": 1, "striped": 1, "dual_chunk_swap": 2}


def needs(layout: str, world: int) -> int:
    """The multiple that a size must be for `layout`; 1 for all that ask nothing of it."""
    pieces = PIECES_PER_RANK.get(layout)
    return pieces * world if pieces else 1


def uncuttable(dim: str, size: int, axis: str, world: int, layout: str) -> str | None:
    """The sentence for a `dim` that `layout` cannot cut over `axis`, else None.

    >>> uncuttable("s", 30, "cp", 4, "dual_chunk_swap")
    's=30 cannot be cut by dual_chunk_swap over cp=4 (needs a multiple of 8); pad to 32'

    Errors: TypeError for a size or world that is no integer.
    """
    check_whole(dim, size)
    check_whole(axis, world)
    if world < 1:
        return f"{axis}={world} is not a number of ranks; it is 1 or more"
    if size < 0:
        return f"{dim}={size} is not a size; sizes are 0 or more"
    multiple = needs(layout, world)
    padded = -(-size // multiple) * multiple
    if padded == size:
        return None
    what = f"{dim}={size} cannot be cut by {layout} over {axis}={world}"
    return f"{what} (needs a multiple of {multiple}); pad to {padded}"


def check_cut(layout: str, size: int, world: int, rank: int | None = None) -> None:
    """ValueError if `size` cannot be cut, or `rank` is none of the ranks; TypeError for what is no integer."""
    check_whole(f"{layout}: size", size)
    check_whole(f"{layout}: world", world)
    if reason := uncuttable("size", size, "world", world, layout):
        raise ValueError(reason)
    if rank is None:
        return
    check_whole(f"{layout}: rank", rank)
    if not 0 <= rank < world:
        raise ValueError(f"{layout}: rank={rank} is not in a world of {world}; ranks are 0 to {world - 1}")


def check_whole(name: str, size: object) -> None:
    """TypeError unless `size` is an integer of any kind, a tensor of one included; True and False are none."""
    if isinstance(size, Tensor) and not size.ndim and not size.is_floating_point() and size.dtype != torch.bool:
        return
    if isinstance(size, bool) or not isinstance(size, Integral | torch.SymInt):
        raise TypeError(f"{name}={size!r} is a {type(size).__name__}; pass an int")
