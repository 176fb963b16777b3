"""A layout as one line of text: the rank that holds each position."""

from collections.abc import Callable, Sequence
from string import ascii_lowercase, digits

import torch
from torch import Tensor

ALPHABET = digits + ascii_lowercase


def draw(layout: Callable[[int, int], Sequence[Tensor]], size: int, world: int) -> str:
    """`layout` as text, one character for each position: its rank in base 36, `?` from rank 36.

    >>> from torch_impl.layouts.dual_chunk_swap import dual_chunk_swap
    >>> draw(dual_chunk_swap, 16, 4)
    '0011223333221100'

    Errors: ValueError if a position is held by no rank or by two.
    """
    pieces = layout(size, world)
    held = torch.cat(list(pieces)).cpu()
    if not torch.equal(held.sort().values, torch.arange(size)):
        name = getattr(layout, "__name__", "given")
        raise ValueError(f"layout {name!r} is not a partition of {size} positions over {world} ranks")
    ranks = torch.arange(world).repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
    owner = ranks[held.argsort()]
    return "".join(ALPHABET[rank] if rank < len(ALPHABET) else "?" for rank in owner.tolist())
