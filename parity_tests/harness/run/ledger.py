"""The ledger: one row for every collective and message that a rank issues, in the order of issue.

All engines write the same rows, so that a scheme's ledger on gloo can be compared with the one on lockstep.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parity_tests.harness.run.users_line import base, is_plumbing

_COLLECTIVES = str(Path(__file__).parents[3] / "torch_impl" / "collectives")


@dataclass(frozen=True)
class Row:
    """What one rank issued.

    `op` is one name per family: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce,
    scatter, gather, barrier, send, recv. `group` is the sorted global ranks; `shapes` and `dtypes` are those of the
    tensors handed in (for recv: the buffer). Bytes are this rank's logical payload, before any algorithm.
    """

    rank: int
    seq: int  # within the group, from 0; p2p counts per (group, op)
    op: str
    group: tuple[int, ...]
    group_name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes_in: int
    bytes_out: int
    reduce_op: str | None = None
    root: int | None = None  # global rank
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # all_to_all: rows to and from each
    peer: int | None = None  # global rank
    tag: int = 0
    is_async: bool = False
    phase: str = "fwd"
    source: str = "?"

    @property
    def payload(self) -> int:
        """Bytes that a declared cost counts: what this rank hands in; for recv, what it receives."""
        return self.bytes_out if self.op == "recv" else self.bytes_in

    def __str__(self) -> str:
        what = " ".join(f"{dtype}{list(shape)}" for dtype, shape in zip(self.dtypes, self.shapes, strict=True))
        extra = "".join(
            [
                f" {self.reduce_op}" if self.reduce_op else "",
                f" root={self.root}" if self.root is not None else "",
                f" splits={list(map(list, self.splits))}" if self.splits else "",
                f" peer={self.peer} tag={self.tag}" if self.peer is not None else "",
            ]
        )
        back = " [bwd]" if self.phase == "bwd" else ""
        return f"{self.op} {what}{extra} (group {self.group_name}, #{self.seq}) at {self.source}{back}"


@dataclass
class Ledger:
    """The rows of every rank of one run."""

    rows: list[Row] = field(default_factory=list)

    def of(self, rank: int) -> list[Row]:
        return [row for row in self.rows if row.rank == rank]

    def cost(self, rank: int, phase: str) -> dict[str, tuple[int, int]]:
        """{op: (calls, bytes)} of one rank in one phase."""
        total: dict[str, tuple[int, int]] = {}
        for row in self.of(rank):
            if row.phase == phase:
                calls, size = total.get(row.op, (0, 0))
                total[row.op] = (calls + 1, size + row.payload)
        return total


def phase() -> str:
    """'bwd' inside an autograd graph task, else 'fwd'."""
    return "fwd" if torch._C._current_graph_task_id() == -1 else "bwd"


def call_site() -> str:
    """file:line of the first frame outside torch, Python's library, the harness, the collectives and their contracts.

    The backward of a collective is called by autograd alone; its node remembers who called the forward.
    """
    inner, node = "?", None
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_COLLECTIVES):
            inner = f"{base(name)}:{frame.f_lineno}"
            node = frame.f_locals.get("ctx", node)
        elif not is_plumbing(name) and "/torch_impl/contract/" not in name:
            source = f"{base(name)}:{frame.f_lineno}"
            if node is not None and not hasattr(node, "called_at"):
                node.called_at = source
            return getattr(node, "called_at", source)
        frame = frame.f_back
    return getattr(node, "called_at", inner)


def group_label(description: str, ranks: Sequence[int], axes: Mapping[str, int]) -> str:
    """How a group is called: its mesh axis, `world` for the default group, else its ranks.

    DeviceMesh takes the default group for an axis that spans all ranks; others it describes as `mesh_<axis>`.
    """
    if description == "default_pg":
        return next((axis for axis, size in axes.items() if size == len(ranks)), "world")
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    return ",".join(map(str, ranks)) if description in ("", "undefined") else description
