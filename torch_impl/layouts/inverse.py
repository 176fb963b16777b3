"""The way back from the rank-major stream to the order of positions, as an index array."""

from collections.abc import Iterable

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from torch_impl.layouts.packed import first

FUNCTION = "layouts.inverse"
REMEDY = "pass a tensor of positions for each rank"


def inverse(positions: Iterable[Int[Tensor, " _"]]) -> Int64[Tensor, " _"]:
    """`inverse[p]` is the row of position p in cat(rank 0, rank 1, ...): `sequential = rank_major[inverse]`.

    >>> inverse([torch.tensor([0, 3]), torch.tensor([1, 2])])
    tensor([0, 2, 3, 1])

    Cost:   one sort, and one read of it by the host; neither where a tensor has no numbers, as while it is traced.
    Errors: ValueError unless the pieces are rows that hold each of 0..n-1 once; TypeError for what are no tensors of
            integers, or none at all.
    """
    rank_major = torch.cat(_checked_pieces(positions)).long()
    _check_permutation(rank_major)
    return inverted(rank_major)


def inverted(rank_major: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """The way back from what is known to be a permutation. Nothing is checked, and nothing waits for the device."""
    rows = torch.arange(len(rank_major), device=rank_major.device)
    return torch.empty_like(rank_major).scatter_(0, rank_major, rows)


def _check_permutation(rank_major: Int64[Tensor, " n"]) -> None:
    """Where it holds numbers: a traced, a vmapped, a fake or a meta tensor has none to look at."""
    if torch.compiler.is_compiling():
        return
    ordered = rank_major.sort().values
    try:
        wrong = first(ordered != torch.arange(len(ordered), device=ordered.device))
    except RuntimeError:
        return
    for k in wrong:
        held = int(ordered[k])
        why = f"{k} is missing" if held > k else f"{held} is {'negative' if held < 0 else 'there twice'}"
        raise ValueError(
            f"{FUNCTION}: positions are not a permutation of 0..{len(ordered) - 1}: {why}; give each position once"
        )


def _checked_pieces(positions: Iterable[Tensor]) -> list[Tensor]:
    """One row of integers for each rank."""
    if not isinstance(positions, Iterable):
        raise TypeError(f"{FUNCTION}: positions={positions!r} is no sequence; {REMEDY}")
    pieces = list(positions)
    if not pieces:
        raise TypeError(f"{FUNCTION}: positions=[] holds no tensor; {REMEDY}")
    for r, piece in enumerate(pieces):
        if not isinstance(piece, Tensor):
            raise TypeError(f"{FUNCTION}: positions[{r}] is a {type(piece).__name__}; {REMEDY}")
        if piece.is_floating_point() or piece.is_complex() or piece.dtype == torch.bool:
            kind = str(piece.dtype).removeprefix("torch.")
            raise TypeError(f"{FUNCTION}: positions[{r}] is {kind}; positions are integers")
        if piece.ndim != 1:
            raise ValueError(f"{FUNCTION}: positions[{r}] is {list(piece.shape)}; positions are one row for each rank")
    return pieces
