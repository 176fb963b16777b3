"""Custom layouts: a size that the layout rejects cannot be sharded and is not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardproof.declare.declaration_failure import raised_by
from shardproof.endings.raised import first_line_of, pass_interrupt

Layout = Callable[[int, int], Any]
# Exceptions for a size that does not fit: a layout's own check, an assertion, or a library's view or reshape.
REJECTIONS = (ValueError, AssertionError, RuntimeError, TypeError)
MULTIPLES = (*range(1, 129), 192, 256, 320, 384, 500, 512, 640, 768, 1000, 1024)  # tried until the layout accepts one
SMALL = range(1, 65)  # tried next, for a layout that accepts no multiple of the number of ranks


def parts(name: str, layout: Layout, dim: str, size: int, axis: str, world: int) -> Any:
    """The positions of each rank.

    Errors: ValueError, with the dim and the layout's own words, if the layout rejects the size; DeclarationFailure for
            any other exception of the layout.
    """
    try:
        positions = layout(size, world)
        return list(positions) if isinstance(positions, Iterable) else positions
    except REJECTIONS as error:
        raise ValueError(f"{dim}={size} cannot be sharded by {name} over {axis}={world}: {_words(error)}") from error
    except BaseException as error:
        pass_interrupt(error)
        raise raised_by(f"layout '{name}'", error) from error


def check_ranks(name: str, positions: Any, world: int) -> None:
    """ValueError unless a layout's result has one row of positions for each rank."""
    try:
        rows = len(positions)
    except TypeError:
        raise ValueError(
            f"layout {name!r} returns a {type(positions).__name__}; return a list of positions for each rank"
        ) from None
    if rows != world:
        raise ValueError(f"layout {name!r} returns positions for {rows} ranks where there are {world}")


def unit(layout: Layout, world: int, step: int) -> int | None:
    """The smallest multiple of `step` that the layout accepts, else the smallest size that it accepts, else None."""
    return next(
        (size for size in (*(step * times for times in MULTIPLES), *SMALL) if _takes(layout, size, world)), None
    )


def never(name: str, layout: Layout, dim: str, axis: str, world: int) -> str | None:
    """The message for a layout that accepts no size on `world` ranks, in the layout's own words; else None.

    Errors: DeclarationFailure for an exception that does not depend on the size.
    """
    if unit(layout, world, world) is not None:
        return None
    try:
        layout(world, world)
    except REJECTIONS as error:
        last = world * MULTIPLES[-1]
        return (
            f"{name} shards no size of {dim} over {axis}={world}, of {world} to {last} tried: {_words(error)}; "
            f"if it shards others, name them: dims={{{dim!r}: (...)}}"
        )
    except BaseException as error:
        pass_interrupt(error)
        raise raised_by(f"layout '{name}'", error) from error
    return None


def _takes(layout: Layout, size: int, world: int) -> bool:
    try:
        layout(size, world)
    except BaseException as error:  # reported when that size is used
        pass_interrupt(error)
        return False
    return True


def _words(error: Exception) -> str:
    kind, first = type(error).__name__, first_line_of(error)
    if not first:
        return f"it raises {kind} without a message"
    return first if isinstance(error, ValueError) else f"{kind}: {first}"
