"""The lines of a user's code that the ranks run, and the kinds of the values in each function."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.engines.engines import run
from shardproof.engines.failure import RankFailure
from shardproof.engines.ledger import is_plumbing
from shardproof.engines.lockstep.rank_globals import imports_of
from shardproof.engines.program import Program, RankResult
from torch_impl.collectives.mesh import MeshView

INSTALLED = re.compile(r".*/(?:site|dist)-packages/(\w+)")

_TORCH = str(Path(torch.__file__).parent)
PARALLEL_TORCH = tuple(
    f"{_TORCH}/{folder}/"
    for folder in ("distributed/fsdp", "distributed/tensor", "distributed/pipelining", "nn/parallel")
)
CELL = "<ipython-input"  # of IPython in a terminal; in a notebook it is a file's name
LIBRARIES = ("builtins", "torch", "numpy", "jax", "triton", "types", "functools", "shardproof")


@dataclass
class Running:
    """A function that ranks run: its lines, those that one call runs again, the kinds of names' values.

    It also tells whether a backward calls the function.
    """

    lines: set[int] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)
    kinds: dict[str, str] = field(default_factory=dict)
    in_backward: bool = False


Functions = dict[CodeType, Running]


@dataclass(frozen=True)
class _TracedProgram(Program):
    """A program: its ranks record the user's functions that they run."""

    functions: Functions = field(default_factory=dict)
    packages: frozenset[str] = frozenset()
    in_torch: bool = False

    def __call__(self, mesh: Any, case: CaseSpec) -> RankResult:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            return super().__call__(mesh, case)
        finally:
            sys.settrace(before)

    def _is_own(self, file: str) -> bool:
        """Whether a file is the user's, or belongs to an installed package that the user's code imports."""
        if self.in_torch and file.startswith(PARALLEL_TORCH):
            return True
        installed, is_generated = INSTALLED.match(file), file.startswith("<") and not file.startswith(CELL)
        return not (is_plumbing(file) or is_generated) and (
            installed is None or installed[1] in self.packages.difference(LIBRARIES)
        )

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not self._is_own(code.co_filename):
            return None
        running = self.functions.setdefault(code, Running())
        running.in_backward |= torch._C._current_graph_task_id() != -1
        of_call = set[int]()

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            running.lines.add(frame.f_lineno)
            if event == "line":
                (running.repeated if frame.f_lineno in of_call else of_call).add(frame.f_lineno)
            if event == "return":
                running.kinds.update(_kinds(frame.f_locals))
            return line

        return line


def running_functions(
    scheme: Declared, case: CaseSpec, caches: Iterable[Any] = (), *, in_torch: bool = False
) -> Functions:
    """Run the case once, on lockstep, with empty caches: the user's functions that any rank runs, backward included.

    With `in_torch`, the functions of torch's parallel code too.
    """
    program, functions = Program.of(scheme), Functions()
    packages = frozenset(name.partition(".")[0] for name in imports_of(program))
    own = {each.name: getattr(program, each.name) for each in fields(program)}
    traced = _TracedProgram(**own, functions=functions, packages=packages, in_torch=in_torch)
    for cache in caches:
        cache.cache_clear()
    try:
        run(traced, case, case.engine)
    except RankFailure:
        return {}
    return functions


def _kinds(names: Mapping[str, Any]) -> dict[str, str]:
    """The kinds of the values of names, of the fields of the user's own objects, and of the groups that fields hold.

    `rank`, `self.rank`, `self.placement.cp`.
    """
    kinds = {name: kind for name, value in names.items() if (kind := _kind(value))}
    for name, value in names.items():
        for field_name, inside in _fields(value):
            own = f"{name}.{field_name}"
            kinds |= {own: kind} if (kind := _kind(inside)) else {}
            kinds |= {f"{own}.{each}": "group" for each, x in _fields(inside) if isinstance(x, dist.ProcessGroup)}
    return kinds


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of an object of the user's, or of the context of a hand-written backward."""
    is_of_library = type(value).__module__.partition(".")[0] in LIBRARIES
    if not isinstance(value, BackwardCFunction) and (is_of_library or isinstance(value, dist.ProcessGroup)):
        return []
    own = [*getattr(value, "__dict__", {}), *getattr(value, "_fields", ())]
    return [(name, getattr(value, name, None)) for name in own]


def _kind(value: Any) -> str:
    """The kind of values that may replace a value: an integer an integer, a tensor a tensor with as many dims."""
    if isinstance(value, torch.Tensor):
        what = "floats" if value.is_floating_point() else "flags" if value.dtype == torch.bool else "integers"
        return f"tensor of {what}, {value.dim()}"
    if isinstance(value, bool | int | float | slice):
        return type(value).__name__
    return "group" if isinstance(value, dist.ProcessGroup) else "mesh" if isinstance(value, MeshView) else ""
