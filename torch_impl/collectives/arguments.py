"""Former names of checks that `torch_impl.contract` and `lengths` implement, for components that import them here."""

from __future__ import annotations

from typing import Literal

from torch.distributed import ProcessGroup

from torch_impl.collectives.lengths import positive_dim as checked_dim

__all__ = ["checked_dim", "checked_group", "checked_type"]


def checked_group(function: str, name: str, group: object, hint: str = "") -> ProcessGroup:
    """`group` itself; TypeError for None or anything else, since torch would fall back to the whole world."""
    if group is None:
        raise TypeError(f"{function}: {name} is None; pass a ProcessGroup{hint}")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"{function}: {name} is a {type(group).__name__}; pass a ProcessGroup{hint}")
    return group


def checked_type(function: str, out: Literal["R", "I"]) -> Literal["R", "I"]:
    """`out` itself, 'R' or 'I'."""
    # The same check as in the signatures, so that the message is the same.
    from torch_impl.contract.kinds import GradientTypeKind

    GradientTypeKind().validate(function, "out", out, {})
    return out
