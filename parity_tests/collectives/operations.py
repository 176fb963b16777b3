"""The collectives that this folder's tests run through: the inputs of each, and its result in NumPy.

A row is one linear map in one form. Adding a collective, or a form of one, is adding a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_impl import collectives as c

ROWS, COLUMNS = 2, 3


def uneven(world: int) -> list[int]:
    """Lengths with an empty one, a short one and a long one."""
    return [(3 * rank + 2) % 5 for rank in range(world)]


@dataclass(frozen=True)
class Operation:
    """`call(x, group)` on a rank; `means(list of the ranks' x)` is the list of the ranks' results.

    `out` is the type of the result, or "V". `cost(world, itemsize, wide)` is the ledger of one rank, forward and
    backward, as {op: (calls, bytes)}; `wide` is the size of an element as it is summed.
    """

    name: str
    call: Callable[[Any, Any], Any]
    shape: Callable[[int, int], tuple[int, ...]]
    means: Callable[[list[np.ndarray]], list[np.ndarray]]
    out: str
    cost: Callable[[int, int, int, int], tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]]

    def __str__(self) -> str:
        return self.name


def _same(rank: int, world: int) -> tuple[int, ...]:
    return ROWS, COLUMNS


def _blocks(dim: int, lengths: Callable[[int], list[int]]) -> Callable[[int, int], tuple[int, ...]]:
    return lambda rank, world: tuple(
        lengths(world)[rank] if d == dim else size for d, size in enumerate((ROWS, COLUMNS))
    )


def _whole(dim: int, lengths: Callable[[int], list[int]]) -> Callable[[int, int], tuple[int, ...]]:
    return lambda rank, world: tuple(sum(lengths(world)) if d == dim else n for d, n in enumerate((ROWS, COLUMNS)))


def _cut(x: np.ndarray, lengths: list[int], dim: int) -> list[np.ndarray]:
    return np.split(x, np.cumsum(lengths)[:-1], axis=dim)


def _exchange(lengths: Callable[[int], list[int]]) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    def means(xs: list[np.ndarray]) -> list[np.ndarray]:
        pieces = [_cut(x, lengths(len(xs)), 1) for x in xs]
        return [np.concatenate([sent[rank] for sent in pieces], axis=0) for rank in range(len(xs))]

    return means


def _routed(xs: list[np.ndarray]) -> list[np.ndarray]:
    """Rank i sends (i + j) % 3 rows to rank j."""
    world = len(xs)
    pieces = [_cut(x, [(i + j) % 3 for j in range(world)], 0) for i, x in enumerate(xs)]
    return [np.concatenate([sent[rank] for sent in pieces], axis=0) for rank in range(world)]


def _route(x: Any, group: Any) -> Any:
    counts = [(group.rank() + j) % 3 for j in range(group.size())]  # symmetric: i sends j as many as j sends i
    return c.all_to_all(x, group, split_dim=0, concat_dim=0, split_lengths=counts, concat_lengths=counts)


def _routed_shape(rank: int, world: int) -> tuple[int, ...]:
    return sum((rank + j) % 3 for j in range(world)), COLUMNS


def _even(world: int) -> list[int]:
    return [2] * world


def _gather_cost(dim: int, out: str, lengths: Callable[[int], list[int]]) -> Callable[..., Any]:
    other = (ROWS, COLUMNS)[1 - dim]

    def cost(rank: int, world: int, itemsize: int, wide: int) -> tuple[dict, dict]:
        piece = max(lengths(world)) * other
        backward = {"reduce_scatter": (1, world * piece * wide)} if out == "R" else {}
        return {"all_gather": (1, piece * itemsize)}, backward

    return cost


def _scatter_cost(rank: int, world: int, itemsize: int, wide: int) -> tuple[dict, dict]:
    piece = max(uneven(world)) * ROWS
    return {"reduce_scatter": (1, world * piece * wide)}, {"all_gather": (1, piece * itemsize)}


def _shift_cost(shift: int) -> Callable[..., Any]:
    def cost(rank: int, world: int, itemsize: int, wide: int) -> tuple[dict, dict]:
        size = ROWS * COLUMNS * itemsize
        once = {} if shift % world == 0 else {"send": (1, size), "recv": (1, size)}
        return once, once

    return cost


def _exchange_cost(rank: int, world: int, itemsize: int, wide: int) -> tuple[dict, dict]:
    lengths = uneven(world)
    there, back = lengths[rank] * sum(lengths), sum(lengths) * lengths[rank]
    return {"all_to_all": (1, there * itemsize)}, {"all_to_all": (1, back * itemsize)}


def _even_exchange_cost(rank: int, world: int, itemsize: int, wide: int) -> tuple[dict, dict]:
    once = {"all_to_all": (1, ROWS * 2 * world * itemsize)}
    return once, once


def _route_cost(rank: int, world: int, itemsize: int, wide: int) -> tuple[dict, dict]:
    once = {"all_to_all": (1, _routed_shape(rank, world)[0] * COLUMNS * itemsize)}
    return once, once


def _whole_cost(op: str, back: str, out: str, forward_wide: bool) -> Callable[..., Any]:
    def cost(rank: int, world: int, itemsize: int, wide: int) -> tuple[dict, dict]:
        size = ROWS * COLUMNS
        backward = {back: (1, size * wide)} if out == "R" else {}
        return {op: (1, size * (wide if forward_wide else itemsize))}, backward

    return cost


OPERATIONS = (
    *(
        Operation(
            f"all_reduce to {out}",
            lambda x, group, out=out: c.all_reduce(x, group, out=out),
            _same,
            lambda xs: [sum(xs)] * len(xs),
            out,
            _whole_cost("all_reduce", "all_reduce", out, True),
        )
        for out in "RI"
    ),
    *(
        Operation(
            f"all_gather of dim {dim} to {out}",
            lambda x, group, out=out, dim=dim: c.all_gather(x, group, out=out, dim=dim, lengths=uneven(group.size())),
            _blocks(dim, uneven),
            lambda xs, dim=dim: [np.concatenate(xs, axis=dim)] * len(xs),
            out,
            _gather_cost(dim, out, uneven),
        )
        for out in "RI"
        for dim in (0, 1)
    ),
    *(
        Operation(
            f"even all_gather to {out}",
            lambda x, group, out=out: c.all_gather(x, group, out=out, dim=-1),
            _blocks(1, _even),
            lambda xs: [np.concatenate(xs, axis=1)] * len(xs),
            out,
            _gather_cost(1, out, _even),
        )
        for out in "RI"
    ),
    Operation(
        "reduce_scatter",
        lambda x, group: c.reduce_scatter(x, group, dim=1, lengths=uneven(group.size())),
        _whole(1, uneven),
        lambda xs: _cut(sum(xs), uneven(len(xs)), 1),
        "V",
        _scatter_cost,
    ),
    Operation(
        "even reduce_scatter",
        lambda x, group: c.reduce_scatter(x, group),
        _whole(0, _even),
        lambda xs: _cut(sum(xs), _even(len(xs)), 0),
        "V",
        lambda rank, world, itemsize, wide: (
            {"reduce_scatter": (1, 2 * world * COLUMNS * wide)},
            {"all_gather": (1, 2 * COLUMNS * itemsize)},
        ),
    ),
    Operation(
        "all_to_all",
        lambda x, group: c.all_to_all(
            x, group, split_dim=1, concat_dim=0, split_lengths=uneven(group.size()), concat_lengths=uneven(group.size())
        ),
        lambda rank, world: (uneven(world)[rank], sum(uneven(world))),
        _exchange(uneven),
        "V",
        _exchange_cost,
    ),
    Operation(
        "even all_to_all",
        lambda x, group: c.all_to_all(x, group, split_dim=-1, concat_dim=0),
        _whole(1, _even),
        _exchange(_even),
        "V",
        _even_exchange_cost,
    ),
    Operation("all_to_all along one dim", _route, _routed_shape, _routed, "V", _route_cost),
    *(
        Operation(
            f"broadcast to {out}",
            lambda x, group, out=out: c.broadcast(x, group, src=group.size() - 1, out=out),
            _same,
            lambda xs: [xs[-1]] * len(xs),
            out,
            _whole_cost("broadcast", "reduce", out, False),
        )
        for out in "RI"
    ),
    *(
        Operation(
            f"ring_shift by {shift}",
            lambda x, group, shift=shift: c.ring_shift(x, group, shift),
            _same,
            lambda xs, shift=shift: [xs[(rank - shift) % len(xs)] for rank in range(len(xs))],
            "V",
            _shift_cost(shift),
        )
        for shift in (1, -1, 2)
    ),
)
