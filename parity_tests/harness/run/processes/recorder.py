"""The recorder: a dispatch mode that writes the ledger and the board of the rank it runs in.

It sees every collective and message of this rank, in place or functional, forward or backward, called by the
scheme or by DTensor, FSDP or DDP underneath, because all of them go through the dispatcher's c10d operators.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from parity_tests.harness.run.ledger import Row, call_site, group_label, phase
from parity_tests.harness.run.processes import status_table
from parity_tests.harness.run.processes.dispatched import OPERATORS, SILENT, Issue, issue


class _Nowhere:
    """A board that nobody reads."""

    def enter(self, state: int) -> None: ...
    def issue(self, text: str) -> None: ...


class Recorder(TorchDispatchMode):
    """Rows of one run of one rank. `axes` are the mesh's, by which groups are called."""

    def __init__(self, slot: status_table.Slot | None = None, axes: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.backend_errors: list[BaseException] = []
        self._slot = slot or _Nowhere()
        self._axes = axes or {}
        self._counts: Counter = Counter()
        self._unwaited: dict[int, tuple[Tensor, Row]] = {}
        self._works: dict[int, tuple[dist.Work, Row]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor runs first and comes back here with its collectives
        if func.namespace not in OPERATORS:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "wait_tensor":
            with self._blocked(self._unwaited.pop(_storage(args[0]), (None, None))[1]):
                return func(*args, **kwargs)
        if name in SILENT:
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        what = issue(func, args, kwargs)
        row = self._row(what)
        self.rows.append(row)
        self._slot.issue(str(row))
        with self._blocked():
            result = func(*args, **kwargs)
        if func.namespace != "c10d":
            for x in (result,) if isinstance(result, Tensor) else result:
                self._unwaited[_storage(x)] = (x, row)
        elif what.is_async or what.peer is not None:
            work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
            self._works[id(work)] = (work, row)  # the caller's handle is this very object, while we hold it
        return result

    def _row(self, what: Issue) -> Row:
        group = what.group.group_name
        key = (group, what.op) if what.op in ("send", "recv") else (group, "")
        self._counts[key] += 1
        ranks = dist.get_process_group_ranks(what.group)
        tensors = what.tensors
        return Row(
            rank=dist.get_rank(),
            seq=self._counts[key] - 1,
            op=what.op,
            group=tuple(sorted(ranks)),
            group_name=group_label(what.group.group_desc, ranks, self._axes),
            dtypes=tuple(str(x.dtype).removeprefix("torch.") for x in tensors),
            shapes=tuple(tuple(x.shape) for x in tensors),
            bytes_in=what.bytes_in,
            bytes_out=what.bytes_out,
            reduce_op=what.reduce_op,
            root=what.root,
            splits=what.splits,
            peer=what.peer,
            tag=what.tag,
            is_async=what.is_async,
            phase=phase(),
            source=call_site(),
        )

    @contextlib.contextmanager
    def _blocked(self, row: Row | None = None) -> Iterator[None]:
        """Inside the backend: the board says so, and an exception from here is the backend's."""
        if row is None:
            self._slot.enter(status_table.WAITING)
        else:
            self._slot.issue(str(row))
        try:
            yield
        except BaseException as error:
            self.backend_errors.append(error)
            raise
        finally:
            self._slot.enter(status_table.COMPUTING)

    def wait(self, work: dist.Work) -> contextlib.AbstractContextManager[None]:
        """The caller waits for this work."""
        return self._blocked(self._works.pop(id(work), (None, None))[1])

    def unwaited(self) -> list[Row]:
        """Functional collectives whose result nobody waited for. (An in-place one is waited for out of sight.)"""
        return list(dict.fromkeys(row for _, row in self._unwaited.values()))

    def is_backends(self, error: BaseException | None) -> bool:
        """True if the error, or one that led to it, came out of a collective."""
        while error is not None:
            if any(error is known for known in self.backend_errors):
                return True
            error = error.__cause__ or error.__context__
        return False


def observe_waits(current: Callable[[], Recorder | None]) -> None:
    """Make this process's `Work.wait` tell the current recorder; for rank processes only, once, at their start.

    Waiting does not go through the dispatcher, so without this a rank blocked in a wait looks like one computing.
    """
    original = dist.Work.wait

    @wraps(original)
    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        with recorder.wait(self) if recorder is not None else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    dist.Work.wait = wait


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
