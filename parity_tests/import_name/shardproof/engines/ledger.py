"""The ledger: one row for every collective and message of a rank, in order of issue, with the line that called it.

It finds torch's folder without importing torch: a process that only names a line of the user's code needs no more.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from shardproof.places import SHARDPROOF, TORCH_IMPL


def _folder_of(package: str) -> str:
    """The folder of an installed package, which is found and not imported. Errors: ModuleNotFoundError."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return str(Path(spec.origin).parent)


MESSAGES = ("send", "recv")
PHASES = {"forward": "fwd", "backward": "bwd"}  # phases of a declared cost, and their names in a row
_PYTHON = str(Path(contextlib.__file__).parent)
_TORCH = _folder_of("torch")
_HARNESS = f"{SHARDPROOF}/"
_LIKE_A_USERS = tuple(f"{SHARDPROOF}/{place}" for place in ("cli/wrong_schemes.py", "tracing/", "training/"))
_MESH_VIEW = str(TORCH_IMPL / "collectives" / "mesh.py")
_CONTRACT = str(TORCH_IMPL / "contract")
COLLECTIVES = str(TORCH_IMPL / "collectives")


@cache
def is_plumbing(name: str) -> bool:
    """Whether a source file belongs to torch, Python, the harness, the argument checks or the mesh."""
    if name.startswith((_TORCH, _HARNESS, _MESH_VIEW, _CONTRACT, "<frozen", "<string", "<__array")):
        return not name.startswith(_LIKE_A_USERS)
    return (name.startswith(_PYTHON) and "site-packages" not in name) or base(name) == "typing_extensions.py"


def base(name: str) -> str:
    """A source file's name without its folder; `cell` for a notebook cell."""
    return "cell" if "ipykernel" in name or name.startswith("<ipython") else name.rpartition("/")[2]


def raised_at(error: BaseException) -> str | None:
    """file:line of the innermost frame of user code, outside libraries if possible."""
    return innermost([(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)])


def innermost(frames: Sequence[tuple[str, int]]) -> str | None:
    """file:line of the last of these frames in user code, outside libraries if possible."""
    user = [(name, line) for name, line in frames if not is_plumbing(name)]
    frames_of_file = [(name, line) for name, line in user if "site-packages" not in name] or user
    return f"{base(frames_of_file[-1][0])}:{frames_of_file[-1][1]}" if frames_of_file else None


def at_users_line(error: BaseException) -> str:
    """` at file:line` of `raised_at`, to append to a message; empty if no frame is user code."""
    at = raised_at(error)
    return f" at {at}" if at else ""


@dataclass(frozen=True)
class LedgerRow:
    """One collective or message that a rank issued.

    `op` is one name per family: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, scatter, gather,
    barrier, send, recv; new_group is the creation of a group, with its `members`. `group` is the sorted global ranks;
    `shapes` and `dtypes` describe the tensors handed in (for recv: the buffer). Bytes are this rank's logical payload,
    before any algorithm.
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
    members: tuple[int, ...] | None = None  # of a new group, global ranks
    module: str = field(default="", compare=False)  # of watched code: the calling module, as Model.layers.0
    rejected: str | None = field(default=None, compare=False)  # lockstep: why a real backend would reject it
    unwaited: bool = field(default=False, compare=False)  # the rank returned without waiting for it
    cuts_graph: bool = field(default=False, compare=False)  # lockstep: autograd records no derivative of this call

    @property
    def payload(self) -> int:
        """Bytes that a declared cost counts: the input of this rank; for recv, its output."""
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
        what = what if self.members is None else str(list(self.members))
        back = " [bwd]" if self.phase == "bwd" else ""
        return f"{self.op} {what}{extra} (group {self.group_name}, #{self.seq}) at {self.source}{back}"


@dataclass(frozen=True)
class CallSite:
    """A line that issues one op in one phase; `seq`, `group` and `rank` narrow it to the ledger rows that have them."""

    op: str
    source: str
    phase: str = "fwd"
    seq: int | None = None
    group: tuple[int, ...] | None = None
    rank: int | None = None

    @classmethod
    def of(cls, row: LedgerRow) -> CallSite:
        """The site of this row alone."""
        return cls(row.op, row.source, row.phase, row.seq, row.group, row.rank)

    def has(self, row: LedgerRow) -> bool:
        """Whether the row was issued at this site."""
        is_there = (self.op, self.source, self.phase) == (row.op, row.source, row.phase)
        return is_there and all(
            at_site in (None, of_row)
            for at_site, of_row in ((self.seq, row.seq), (self.group, row.group), (self.rank, row.rank))
        )

    def __str__(self) -> str:
        number = "" if self.seq is None else f" #{self.seq}"
        return f"{self.op}{number} at {self.source}"


class Finding(str):
    """A sentence about an error in a run, with the call sites that it blames."""

    sites: tuple[CallSite, ...]

    def __new__(cls, text: str, sites: Iterable[CallSite] = ()) -> Self:
        finding = super().__new__(cls, text)
        finding.sites = tuple(sites)
        return finding

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.sites


@dataclass
class Ledger:
    """The rows of every rank of one run."""

    rows: list[LedgerRow] = field(default_factory=list)

    def __str__(self) -> str:
        """The table of collectives and bytes by module, for the first rank in the ledger."""
        from shardproof.engines.ledger_table import table

        return table(self)

    def _repr_html_(self) -> str:
        from shardproof.report.notebook import of_ledger

        return of_ledger(self)

    def of(self, rank: int) -> list[LedgerRow]:
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
    import torch

    return "fwd" if torch._C._current_graph_task_id() == -1 else "bwd"


def call_site() -> str:
    """file:line of the first frame outside torch, Python's library, the harness, the collectives and their contracts.

    The backward of a collective (ours or torch's) has the line of its forward, which `node_lines` keeps.
    """
    inner, node = "?", None
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_collective = name.startswith(COLLECTIVES)
        if (is_collective or name.startswith(_TORCH)) and "ctx" in frame.f_code.co_varnames:
            node = frame.f_locals.get("ctx", node)
        if is_collective:
            inner = f"{base(name)}:{frame.f_lineno}"
        elif not is_plumbing(name) and "/torch_impl/contract/" not in name:
            return getattr(node, "called_at", f"{base(name)}:{frame.f_lineno}")
        frame = frame.f_back
    return getattr(node, "called_at", inner)


def line_of_thread(thread: int | None) -> str | None:
    """file:line where a thread is now: its innermost frame of user code, outside libraries if possible.

    Here the mesh and the collectives count as libraries. While the thread imports a module, the line is the import
    statement: code that runs during the import is not a step of the function.
    """
    frame, users, of_library = sys._current_frames().get(thread or 0), None, None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            users = of_library = None
        elif not is_plumbing(name):
            line = f"{base(name)}:{frame.f_lineno}"
            if "site-packages" in name or name.startswith(COLLECTIVES):
                of_library = of_library or line
            else:
                users = users or line
        frame = frame.f_back
    return users or of_library


def group_label(description: str, ranks: Sequence[int], axes: Mapping[str, int]) -> str:
    """The name of a group: its mesh axis, `world` for the default group, else its ranks.

    DeviceMesh takes the default group for an axis that spans all ranks, and describes other groups as `mesh_<axis>`.
    """
    if description == "default_pg":
        return next((axis for axis, size in axes.items() if size == len(ranks)), "world")
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    return ",".join(map(str, ranks)) if description in ("", "undefined") else description


@dataclass(frozen=True)
class RunResult:
    """Each rank's result, every collective it issued, and the seconds between start and last result."""

    results: tuple[Any, ...]
    ledger: Ledger
    seconds: float
