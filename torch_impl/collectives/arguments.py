"""What a collective checks before it sends anything: the group, the dim, the lengths, the gradient type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.distributed import ProcessGroup

TYPES = {"R": "gradients add up", "I": "same gradient"}


def checked_group(function: str, name: str, group: object, hint: str = "") -> ProcessGroup:
    """`group` itself; TypeError for None or anything else, since torch would fall back to the whole world."""
    if group is None:
        raise TypeError(f"{function}: {name} is None; pass a ProcessGroup{hint}")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"{function}: {name} is a {type(group).__name__}; pass a ProcessGroup{hint}")
    return group


def checked_type(function: str, out: Literal["R", "I"]) -> Literal["R", "I"]:
    """`out` itself, 'R' or 'I'."""
    if out not in TYPES:
        choice = " or ".join(f"{letter!r} ({meaning})" for letter, meaning in TYPES.items())
        raise ValueError(f"{function}: out={out!r} is not the type of a whole result; write {choice}")
    return out


def checked_dim(function: str, name: str, dim: int, x: Tensor) -> int:
    """`dim` counted from the front."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{function}: {name}={dim} is outside a tensor of {x.ndim} dims")
    return dim % x.ndim


def checked_rank(function: str, name: str, rank: int, group: ProcessGroup) -> int:
    """`rank` itself, a rank inside the group."""
    if not 0 <= rank < group.size():
        raise ValueError(f"{function}: {name}={rank} is outside a group of {group.size()} ranks")
    return rank


def checked_lengths(function: str, name: str, lengths: Sequence[int], group: ProcessGroup) -> list[int]:
    """`lengths` as a list, one length for each rank of the group."""
    if len(lengths) != group.size():
        raise ValueError(f"{function}: {name}={list(lengths)} has {len(lengths)} entries for {group.size()} ranks")
    if min(lengths) < 0:
        raise ValueError(f"{function}: {name}={list(lengths)} has a negative entry")
    return list(lengths)


def joined_lengths(
    function: str, name: str, lengths: Sequence[int] | None, held: int, dim: int, group: ProcessGroup
) -> list[int]:
    """Lengths of the pieces that the ranks hold, this one `held` positions; None means all hold as many."""
    if lengths is None:
        return [held] * group.size()
    lengths, rank = checked_lengths(function, name, lengths, group), group.rank()
    if lengths[rank] != held:
        raise ValueError(f"{function}: {name}[{rank}]={lengths[rank]} but it holds {held} positions along dim {dim}")
    return lengths


def cut_lengths(
    function: str, name: str, lengths: Sequence[int] | None, size: int, dim: int, group: ProcessGroup
) -> list[int]:
    """Lengths into which `size` positions are cut, one for each rank; None means equal ones."""
    world = group.size()
    if lengths is None:
        if size % world:
            raise ValueError(
                f"{function}: dim {dim} has {size} positions, which {world} ranks cannot share equally; pass {name}"
            )
        return [size // world] * world
    lengths = checked_lengths(function, name, lengths, group)
    if sum(lengths) != size:
        raise ValueError(f"{function}: {name}={lengths} add up to {sum(lengths)} but dim {dim} has {size} positions")
    return lengths
