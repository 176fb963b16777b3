"""The lockstep ProcessGroup: turns torch's calls, as torch 2.11 to 2.14 name them, into calls of the exchange.

C++ code (functional collectives, DDP's reducer) calls these methods too, through the overrides that torch declares.
"""

# In torch's stubs each overload has its own argument names; no single signature fits all overloads.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shardproof.engines import futures
from shardproof.engines.failure import CANNOT_RUN, GROUP_HINT
from shardproof.engines.ledger import LedgerRow, call_site, group_label, phase
from shardproof.engines.lockstep import operations, world
from shardproof.engines.lockstep.backends import LockstepBackend, rejection
from shardproof.engines.lockstep.call import CommunicationCall
from shardproof.engines.lockstep.exchange import NO_TURN, Exchange
from shardproof.engines.lockstep.operations import listed, nested, reduce_op, root_place
from shardproof.engines.lockstep.repair import NO_POISON

Tensors = Sequence[Tensor]
Split = Callable[[list[Tensor]], list[Tensor]]


class LockstepWork(dist.Work):
    """Waits for one call, or for the calls of a coalesced block together."""

    def __init__(self, exchange: Exchange, calls: Sequence[CommunicationCall]) -> None:
        super().__init__()
        self._exchange, self.calls = exchange, calls

    def wait(self, timeout: timedelta | None = None) -> bool:
        for call in self.calls:
            self._exchange.wait(call)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._done():
            self._exchange.scheduler.let_others_run(self.calls[0].row.rank)
        if self._done():
            self.wait()  # its results may be read from now on, as after a wait
        return self._done()

    def is_success(self) -> bool:
        return self._done() and self.wait()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return [output for call in self.calls for output in call.outputs]

    def get_future(self) -> torch.futures.Future:
        """A completed future. Waits first, because C++ would wait for the future without telling the scheduler."""
        future: torch.futures.Future = torch.futures.Future()
        new = [call for call in self.calls if not call.waited]
        future.set_result(self.result())
        if futures.is_called_by_python():
            self._exchange.owe(new)
            futures.hold(future, self.wait)
        return future

    def source_rank(self) -> int:
        return self.calls[0].origin

    def _source_rank(self) -> int:
        return self.calls[0].origin

    def _done(self) -> bool:
        return all(call.done for call in self.calls)


class CollectedWork(LockstepWork):
    """A call inside a coalesced block: waiting for the block waits for this call."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


Work = LockstepWork

_MEMBERS = "changes the members of a group, which lockstep's ranks keep; make a new group"
_HOOKS = "has no meaning where ranks take turns; read the ledger"
# Methods of torch's ProcessGroup that raise on this engine: the problem with each, and the remedy.
MISSING = {
    "split_group": "needs a backend bound to a device; use new_group",
    "merge_remote_group": "joins processes, and lockstep runs in one process; use new_group",
    "_backend_id": "has no result, because the group is its own backend; call the group",
    "_register_backend": "is not possible, because the group is its own backend; call the group",
    "_set_default_backend": "is not possible, because the group is its own backend; call the group",
    "_get_sequence_number_for_group": "is in the ledger; read LedgerRow.seq",
    "_set_sequence_number_for_group": "is in the ledger; read LedgerRow.seq",
    "_enable_collectives_timing": "has no meaning where ranks take turns; time the gloo engine",
    "_register_on_completion_hook": _HOOKS,
    "register_pre_hook": _HOOKS,
    "register_post_hook": _HOOKS,
    "register_abort_hook": _HOOKS,
    "unregister_pre_hook": _HOOKS,
    "unregister_post_hook": _HOOKS,
    "unregister_abort_hook": _HOOKS,
    "get_reconfigure_handle": _MEMBERS,
    "reconfigure": _MEMBERS,
    "new_window": "writes into the memory of another rank, in an order that no exchange knows; send a message",
    "_wait_for_pending_works": "has no meaning where ranks take turns; wait for each Work",
}

# Methods that stay torch's own, because they work for any group. Every other method is defined below, or raises.
INHERITED = {"BackendType", "_get_backend_name", "_id", "_pybind11_conduit_v1_", "abort", "boxed", "name", "rank"}
INHERITED |= {"set_timeout", "shutdown", "size", "unbox"}


def create(options: Any, backend_options: Any) -> LockstepGroup:
    """Create a group of this backend; c10d calls it in the thread of one rank."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return LockstepGroup(options.store, options.group_rank, ranks)


class LockstepGroup(dist.ProcessGroup):
    """One rank's end of a group; `ranks` are global, in group order."""

    def __init__(self, store: Store, place: int, ranks: tuple[int, ...]) -> None:
        super().__init__(place, len(ranks))  # pyright: ignore[reportCallIssue]  (the stub lacks this overload)
        self.ranks, self._store = ranks, store
        self._place, self._size, self._rank = place, len(ranks), ranks[place]
        self._world = world.here()
        self._exchange = self._world.exchange
        self._name, self._desc = "", ""
        self._block: list[CommunicationCall] | None = None

    if not TYPE_CHECKING:  # otherwise a type checker accepts any attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; {GROUP_HINT}")

    # Properties of the group.

    def getBackendName(self) -> str:
        return world.BACKEND

    def _get_backend(self, device: torch.device | str) -> LockstepBackend:
        kind = torch.device(device).type
        if kind != "cpu":  # torch's own message, for callers that catch it
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return LockstepBackend(self)

    get_backend = _get_backend

    def _has_hooks(self) -> bool:
        return False

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Does nothing: collectives have no timeout on this engine."""

    supports_reconfigure = supports_window = False

    def get_group_store(self) -> Store:
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors = listed(tensors)
        return self._collective("all_reduce", tensors, tensors, opts, reduce_op=reduce_op(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        tensors, root = listed(tensors), root_place(opts)
        name = reduce_op(opts) if hasattr(opts, "reduceOp") else reduce_op(op)
        return self._collective(
            "reduce", tensors, tensors if root == self._place else [], opts, root=root, reduce_op=name
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        outputs, inputs = listed(outputs), nested(inputs)
        for output, parts in zip(outputs, inputs, strict=True):
            operations.check_uneven("reduce_scatter", parts, self._place, self._size, output)
        flat = [part for parts in inputs for part in parts]
        return self._collective("reduce_scatter", flat, outputs, opts, reduce_op=reduce_op(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, full in zip(outputs, inputs, strict=True):
            operations.check_full_size("reduce_scatter", "the input", full, output, self._size)

        def split(copies: list[Tensor]) -> list[Tensor]:
            return [part for copy in copies for part in copy.reshape(self._size, -1).unbind(0)]

        return self._collective("reduce_scatter", inputs, outputs, opts, split, reduce_op=reduce_op(opts))

    # Copies.

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors, root = listed(tensors), root_place(opts)
        return self._collective("broadcast", tensors, [] if root == self._place else tensors, opts, root=root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        outputs, inputs = nested(outputs), listed(inputs)
        for parts, one in zip(outputs, inputs, strict=True):
            operations.check_uneven("all_gather", parts, self._place, self._size, one)
        flat = [part for parts in outputs for part in parts]
        if len({part.shape for part in flat}) == 1 or len(inputs) > 1:
            return self._collective("all_gather", inputs, flat, opts)
        splits = operations.uneven_splits(inputs[0], flat)
        return self._collective("all_gather", inputs, flat, opts, splits=splits, expected=flat)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self.allgather([[line[j] for line in outputs] for j in range(len(inputs))], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for full, one in zip(outputs, inputs, strict=True):
            operations.check_full_size("all_gather", "the output", full, one, self._size)
        return self._collective("all_gather", inputs, outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        inputs, root, parts = listed(inputs), root_place(opts), []
        if root == self._place:
            parts = nested(outputs)[0]
            operations.check_one_each("gather", parts, self._size, like=inputs[0])
        return self._collective("gather", inputs, parts, opts, root=root)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        root = root_place(opts)
        if root == self._place:
            operations.check_full_size("gather", "the output", output, input, self._size)
        return self._collective("gather", [input], [output] if root == self._place else [], opts, root=root)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        outputs, root, parts = listed(outputs), root_place(opts), []
        if root == self._place:
            parts = nested(inputs)[0]
            operations.check_one_each("scatter", parts, self._size, like=outputs[0])
        return self._collective("scatter", parts, outputs, opts, root=root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None) -> Work:
        for tensors in (inputs, outputs):
            operations.check_one_each("all_to_all", tensors, self._size)
        splits = (tuple(map(operations.rows, inputs)), tuple(map(operations.rows, outputs)))
        return self._collective("all_to_all", inputs, outputs, opts, splits=splits, expected=list(outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        gives = operations.splits_of("the input", input, input_split_sizes, self._size)
        takes = operations.splits_of("the output", output, output_split_sizes, self._size)

        def split(copies: list[Tensor]) -> list[Tensor]:
            return list(copies[0].split(gives))

        expected = list(output.data.split(takes))
        splits = (tuple(gives), tuple(takes))
        return self._collective("all_to_all", [input], [output], opts, split, splits=splits, expected=expected)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        return self._collective("barrier", [], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # Messages.

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        return self._post("send", tensors, [], dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        return self._post("recv", tensors, tensors, srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._post("recv", tensors, tensors, None, tag)

    # Blocks of calls that complete together.

    def _start_coalescing(self, device: torch.device) -> None:
        self._block = []

    def _end_coalescing(self, device: torch.device) -> Work:
        calls, self._block = self._block or [], None
        return Work(self._exchange, calls)

    # The names of torch 2.11 and 2.12.

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    # How a call is made.

    def _collective(
        self,
        op: str,
        inputs: Tensors,
        outputs: Tensors,
        opts: Any,
        split: Split | None = None,
        *,
        root: int | None = None,
        expected: Tensors = (),
        **details: Any,
    ) -> Work:
        self._check_caller(op)
        key = (self._name, self.ranks)
        is_async = getattr(opts, "asyncOp", True)
        root = None if root is None else self.ranks[root]
        seq = self._exchange.next_seq(self._rank, key)
        row = self._row(op, inputs, outputs, seq=seq, root=root, is_async=is_async, **details)
        repair = self._exchange.repair
        other = None if repair is None else repair.other_group(row, self._exchange.axes, self._world.pg_map)
        if other is not None and other is not self:
            return other._collective(op, inputs, outputs, opts, split, expected=expected, **details)
        self._notify(row)
        call = CommunicationCall(
            row, self._place, inputs, outputs, expected=expected, tracked=is_async and self._poisons(row)
        )
        if self._exchange.repair is not None:
            self._exchange.repair.mend_gradient(row, outputs, self._total)
        call.take(split)
        self._exchange.collective(key, call)
        return self._work(call)

    def _post(self, op: str, tensors: Tensors, outputs: Tensors, peer: int | None, tag: int) -> Work:
        self._check_caller(op)
        key = (self._name, self.ranks)
        seq = self._exchange.next_seq(self._rank, (key, op))
        peer_rank = None if peer is None else self.ranks[peer]
        row = self._row(op, tensors, outputs, seq=seq, peer=peer_rank, tag=tag)
        self._notify(row)
        call = CommunicationCall(row, self._place, [] if outputs else tensors, outputs, tracked=self._poisons(row))
        call.take(None)
        self._exchange.post(key, call, peer)
        return self._work(call)

    def _check_caller(self, op: str) -> None:
        """Reject a call from another rank, which may have found this rank's group in a global or in a closure."""
        caller = world.current()
        if caller is None:
            raise RuntimeError(f"{op} is called in {NO_TURN}")
        if caller is not self._world:
            label = group_label(self._desc, self.ranks, self._exchange.axes)
            caller.exchange.foreign_group(op, self._rank, label)
        if self not in caller.pg_map and self not in caller.left and caller.default_pg is not None:
            raise ValueError(f"{op}: the process group of ranks {list(self.ranks)} is destroyed; make a new one")

    def _notify(self, row: LedgerRow) -> None:
        """Tell this rank's listeners that it issues this call."""
        for listener in self._world.listeners:
            listener(row)

    def _poisons(self, row: LedgerRow) -> bool:
        """Whether the outputs of this call are poisoned until its wait; a repair can turn this off."""
        repair = self._exchange.repair
        return repair is None or not repair.concerns(row, NO_POISON)

    def _total(self, addend: Tensor) -> Tensor:
        total = addend.clone(memory_format=torch.contiguous_format)
        self.allreduce([total]).wait()
        return total

    def _work(self, call: CommunicationCall) -> Work:
        if self._block is None:
            return Work(self._exchange, [call])
        self._block.append(call)
        return CollectedWork(self._exchange, [call])

    def _row(self, op: str, inputs: Tensors, outputs: Tensors, **details: Any) -> LedgerRow:
        return LedgerRow(
            rank=self._rank,
            op=op,
            group=tuple(sorted(self.ranks)),
            group_name=group_label(self._desc, self.ranks, self._exchange.axes),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in inputs),
            shapes=tuple(tuple(t.shape) for t in inputs),
            bytes_in=0 if op == "recv" else operations.size_in_bytes(inputs),
            bytes_out=operations.size_in_bytes(outputs),
            phase=phase(),
            source=call_site(),
            rejected=rejection(op, inputs, outputs),
            cuts_graph=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs),
            **details,
        )


def _rejection(name: str, reason: str) -> Callable[..., NoReturn]:
    def rejected(self: LockstepGroup, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{CANNOT_RUN}: ProcessGroup.{name} {reason}")

    return rejected


def reject_missing() -> None:
    """Make each ProcessGroup method that this engine lacks raise a message with the method's name.

    Without this, a method that a later torch adds would reach C++, and its error is about a missing device backend.
    """
    for name, reason in MISSING.items():
        setattr(LockstepGroup, name, _rejection(name, reason))
    unknown = "is not carried out by this engine; verify with --engine gloo"
    for name in vars(dist.ProcessGroup):
        is_method = callable(getattr(dist.ProcessGroup, name)) and not name.startswith("__")
        if is_method and name not in INHERITED and name not in vars(LockstepGroup):
            setattr(LockstepGroup, name, _rejection(name, unknown))


reject_missing()
