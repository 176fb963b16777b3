"""The recorder: a dispatch mode that writes the ledger and the status table of its rank.

It sees every collective and message of this rank, in place or functional, forward or backward, called by the scheme or
by DTensor, FSDP or DDP, because all of them go through the dispatcher's c10d operators.
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from shardproof.endings.raised import chain
from shardproof.engines import futures
from shardproof.engines.ledger import MESSAGES, LedgerRow, call_site, group_label, phase
from shardproof.engines.lockstep.operations import uneven_splits
from shardproof.engines.processes import status_table

# operator -> (family, input argument, output argument; None: a new tensor)
_Table = Mapping[str, tuple[str, str, str | None]]
IN_PLACE: _Table = {
    "allreduce_": ("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors", "tensors"),
    "allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": ("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", "outputs"),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": ("all_to_all", "input", "output"),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "reduce_": ("reduce", "tensors", "tensors"),
    "scatter_": ("scatter", "input_tensors", "output_tensors"),
    "gather_": ("gather", "input_tensors", "output_tensors"),
    "gather_into_tensor_": ("gather", "input_tensor", "output_tensor"),  # torch 2.14
    "barrier": ("barrier", "", ""),
    "monitored_barrier_": ("barrier", "", ""),
    "send": ("send", "tensors", ""),
    "recv_": ("recv", "", "tensors"),
    "recv_any_source_": ("recv", "", "tensors"),
}
FUNCTIONAL: _Table = {
    "all_reduce": ("all_reduce", "input", None),
    "all_reduce_": ("all_reduce", "input", None),
    "all_reduce_coalesced": ("all_reduce", "inputs", None),
    "all_reduce_coalesced_": ("all_reduce", "inputs", None),
    "all_gather_into_tensor": ("all_gather", "input", None),
    "all_gather_into_tensor_out": ("all_gather", "input", None),
    "all_gather_into_tensor_coalesced": ("all_gather", "inputs", None),
    "reduce_scatter_tensor": ("reduce_scatter", "input", None),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input", None),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs", None),
    "all_to_all_single": ("all_to_all", "input", None),
    "broadcast": ("broadcast", "input", None),
    "broadcast_": ("broadcast", "input", None),
    "isend": ("send", "tensor", ""),
    "irecv": ("recv", "", "tensor"),
}
OPERATORS: Mapping[str, _Table] = {"c10d": IN_PLACE, "_c10d_functional": FUNCTIONAL}
SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
MOST_OPEN = 4  # the status table shows at most so many open calls of a rank that dies
MISSING = {"batch_p2p_ops": "it mixes sends and receives in one call, for compiled code; use batch_isend_irecv"}


@dataclass(frozen=True)
class Issue:
    """One call as the ledger describes it; ranks are global."""

    op: str
    group: dist.ProcessGroup
    tensors: tuple[Tensor, ...]
    bytes_in: int
    bytes_out: int
    reduce_op: str | None
    root: int | None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None
    peer: int | None
    tag: int
    is_async: bool


def issue(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Issue:
    """The collective or message of this call."""
    name = func._schema.name.partition("::")[2]
    table = OPERATORS[func.namespace]
    if name not in table:
        raise NotImplementedError(f"ledger: {name} is not written down: {MISSING.get(name, 'it is not known')}")
    op, takes, gives = table[name]
    call = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()} | dict(kwargs)
    call |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    group = _group(call)
    ranks = dist.get_process_group_ranks(group)
    handed = _tensors(call.get(takes))
    written = _tensors(call.get(gives)) if gives is not None else None
    splits = _splits(call, handed, written, len(ranks)) if op == "all_to_all" else None
    if op == "all_gather" and len(handed) == 1 and len({tensor.shape for tensor in written or ()}) > 1:
        splits = uneven_splits(handed[0], written or ())
    size_in = sum(map(_nbytes, handed))
    size_out = _functional_bytes(op, handed, len(ranks), splits) if written is None else sum(map(_nbytes, written))
    root = call.get("root_rank", call.get("src") if op == "broadcast" else None)
    root = None if root is None else ranks[root]
    if (op == "reduce" and root != dist.get_rank()) or (op == "broadcast" and root == dist.get_rank()):
        size_out = 0  # this rank receives nothing
    peer = call.get("dst", call.get("src")) if op in MESSAGES else None
    return Issue(
        op=op,
        group=group,
        tensors=handed if op != "recv" else written or (),
        bytes_in=size_in,
        bytes_out=size_out,
        reduce_op=_reduce_op(call.get("reduce_op")),
        root=root,
        splits=splits,
        peer=None if peer is None else ranks[peer],
        tag=call.get("tag", 0),
        # torch does not say so of a message: send and isend are one operator.
        is_async=peer is None and (func.namespace != "c10d" or bool(call.get("async_op", False))),
    )


def _group(call: Mapping[str, Any]) -> dist.ProcessGroup:
    group = call.get("process_group", call.get("group_name"))
    if isinstance(group, str):
        return torch._C._distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportAttributeAccessIssue]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _reduce_op(op: Any) -> str | None:
    if op is None:
        return None
    return op.upper() if isinstance(op, str) else dist.ReduceOp.RedOpType(op.op()).name


def _tensors(argument: Any) -> tuple[Tensor, ...]:
    if isinstance(argument, Tensor):
        return (argument,)
    return tuple(t for item in argument or () for t in _tensors(item))


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _rows(x: Tensor) -> int:
    return x.shape[0] if x.dim() else 1


def _splits(
    call: Mapping[str, Any], handed: tuple[Tensor, ...], written: tuple[Tensor, ...] | None, world: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows to each peer, rows from each peer); empty splits mean equal ones."""
    if "input_tensors" in call:
        return tuple(map(_rows, handed)), tuple(map(_rows, written or ()))
    sent = tuple(call["input_split_sizes"]) or (_rows(handed[0]) // world,) * world
    received = tuple(call["output_split_sizes"])
    if not received:
        received = (_rows(written[0] if written else handed[0]) // world,) * world
    return sent, received


def _functional_bytes(op: str, handed: tuple[Tensor, ...], world: int, splits: Any) -> int:
    """Bytes of the tensor that a functional collective returns."""
    sizes: Mapping[str, Callable[[int], int]] = {
        "all_gather": lambda size: size * world,
        "reduce_scatter": lambda size: size // world,
    }
    if op == "all_to_all":
        (x,) = handed
        return sum(splits[1]) * math.prod(x.shape[1:]) * x.element_size()
    return sum(sizes.get(op, int)(_nbytes(x)) for x in handed)


class _Nowhere:
    """A status table that is never read."""

    def enter(self, state: int) -> None: ...
    def issue(self, row: object, *, open_rows: object = ()) -> None: ...


class _BesideCompiler(TorchDispatchMode):
    """A dispatch mode that neither loads torch's compiler nor keeps it from compiling."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch would import its compiler, which takes a second, at the first operation of each process."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch would silently compile nothing while a rank is recorded."""
        return True


class Recorder(_BesideCompiler):
    """Rows of one run of one rank. `axes` are the mesh's axes, which name the groups."""

    def __init__(self, slot: status_table.Slot | None = None, axes: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.rows: list[LedgerRow] = []
        self.backend_errors: list[BaseException] = []
        self.thread_errors: list[BaseException] = []  # each ended a thread that the rank had started
        self._slot = slot or _Nowhere()
        self._axes = axes or {}
        self._counts: Counter = Counter()
        self.creations: Counter[str] = Counter()
        self._unwaited: dict[int, tuple[Tensor, LedgerRow]] = {}
        self._works: dict[int, _Issued] = {}
        self._uncompiled: Callable[..., Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        # If the compiler is loaded anyway, it must compile the code between operations, but not this function.
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is None:
            return self._dispatch(func, types, args, kwargs or {})
        uncompiled = self._uncompiled = self._uncompiled or disable(self._dispatch)
        return uncompiled(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor's own rule runs first, and its collectives come back here
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
        self._slot.issue(row, open_rows=self._open())
        with self._blocked():
            result = func(*args, **kwargs)
        if func.namespace != "c10d":
            for x in (result,) if isinstance(result, Tensor) else result:
                self._unwaited[_storage(x)] = (x, row)
        elif what.is_async or what.peer is not None:
            work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
            # While we hold it, the caller's handle is this very object.
            self._works[id(work)] = _Issued(work, row, has_handle=_is_called_by_c10d())
        return result

    def _row(self, what: Issue) -> LedgerRow:
        group = what.group.group_name
        key = (group, what.op) if what.op in MESSAGES else (group, "")
        self._counts[key] += 1
        ranks = dist.get_process_group_ranks(what.group)
        tensors = what.tensors
        return LedgerRow(
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

    def _open(self) -> list[LedgerRow]:
        return [each.row for each in self._works.values()][-MOST_OPEN:]

    @contextlib.contextmanager
    def _blocked(self, row: LedgerRow | None = None) -> Iterator[None]:
        """A block inside the backend: the status table shows it, and exceptions in it belong to the backend."""
        if row is None:
            self._slot.enter(status_table.WAITING)
        else:
            self._slot.issue(row, open_rows=self._open())
        try:
            yield
        except BaseException as error:
            self.backend_errors.append(error)
            raise
        finally:
            self._slot.enter(status_table.COMPUTING)

    @contextlib.contextmanager
    def creation(self, row: LedgerRow) -> Iterator[None]:
        """A block that makes a group; the members of the group wait for each other in it."""
        self.rows.append(row)
        self._slot.issue(row)
        try:
            yield
        except RuntimeError as error:  # any other error comes from the arguments
            self.backend_errors.append(error)
            raise
        finally:
            self._slot.enter(status_table.COMPUTING)

    def wait(self, work: dist.Work) -> contextlib.AbstractContextManager[None]:
        """In this block, the caller waits for this work."""
        issued = self._works.pop(id(work), None)
        return self._blocked(issued and issued.row)

    def is_seen(self, work: dist.Work) -> None:
        """Note that the caller knows that this work is complete."""
        self._works.pop(id(work), None)

    def unwaited(self) -> list[LedgerRow]:
        """Functional collectives and asynchronous calls that nobody waited for.

        Work that C++ has issued, as DDP's reducer does, is waited for in C++; it counts only if it is not done.
        """
        functional = [row for _, row in self._unwaited.values()]
        works = [each.row for each in self._works.values() if each.has_handle or not _is_done(each.work)]
        return sorted(dict.fromkeys(functional + works), key=self.rows.index)

    def is_backends(self, error: BaseException | None) -> bool:
        """True if the error, or an error that caused it, was raised inside a collective."""
        return any(each is of_backend for each in chain(error) for of_backend in self.backend_errors)


@dataclass(frozen=True)
class _Issued:
    """The work of an asynchronous call. With `has_handle` the caller holds it, and must wait for it."""

    work: dist.Work
    row: LedgerRow
    has_handle: bool


class OfThread(_BesideCompiler):
    """Record the calls of a thread as calls of the rank that started it. A dispatch mode belongs to one thread."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return self._recorder.__torch_dispatch__(func, types, args, kwargs)


WAITING_METHODS = ("wait", "synchronize", "result")
TELLING_METHODS = ("is_completed", "is_success")  # if they answer True
FUTURE_METHODS = ("get_future", "get_future_result")  # who waits for the future waits for the work
_is_completed, _future = dist.Work.is_completed, dist.Work.get_future


def observe_waits(current: Callable[[], Recorder | None]) -> None:
    """Make this process's `Work` notify the current recorder; call once at the start of a rank's process.

    Waiting bypasses the dispatcher, so without this a rank blocked in a wait would look as if it computed.
    """
    for name in (*WAITING_METHODS, *TELLING_METHODS, *FUTURE_METHODS):
        if hasattr(dist.Work, name):
            setattr(dist.Work, name, _observed(getattr(dist.Work, name), name, current))


def _observed(method: Callable[..., Any], name: str, current: Callable[[], Recorder | None]) -> Callable[..., Any]:
    @wraps(method)
    def observed(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        waits = recorder is not None and name in WAITING_METHODS
        with recorder.wait(self) if recorder is not None and waits else contextlib.nullcontext():
            answer = method(self, *args, **kwargs)
        if recorder is not None and name in FUTURE_METHODS:
            futures.hold(answer, partial(recorder.is_seen, self))
        elif recorder is not None and answer:
            recorder.is_seen(self)
        return answer

    return observed


def _is_done(work: dist.Work) -> bool:
    """Whether the work has its result. Its future may have it before, and C++ waits for the future."""
    with contextlib.suppress(RuntimeError):  # of a backend without futures
        return _is_completed(work) or _future(work).done()
    return False


def _is_called_by_c10d() -> bool:
    """Whether a Python function of c10d made this call; it returns the work to the caller."""
    frames = traceback.walk_stack(sys._getframe(1))
    return any(frame.f_code.co_filename == dist.distributed_c10d.__file__ for frame, _ in frames)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
