"""The lockstep ProcessGroup: torch's calls, under the names of torch 2.11 to 2.13, turned into calls of the traffic.

C++ reaches these methods too (functional collectives, DDP's reducer), through the overrides that torch declares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from parity_tests.harness.engines import world
from parity_tests.harness.engines.call import Call
from parity_tests.harness.engines.ledger import Row, call_site, group_label, phase
from parity_tests.harness.engines.reduction import name_of
from parity_tests.harness.engines.work import CollectedWork, LockstepWork

Tensors = Sequence[Tensor]
Cut = Callable[[list[Tensor]], list[Tensor]]


def create(options: Any, backend_options: Any) -> LockstepGroup:
    """What c10d calls to make a group of this backend, in the thread of one rank."""
    return LockstepGroup(options.group_rank, options.group_size, tuple(options.global_ranks_in_group))


class LockstepGroup(dist.ProcessGroup):
    """One rank's end of a group; `ranks` in group order."""

    def __init__(self, rank: int, size: int, ranks: tuple[int, ...]) -> None:
        super().__init__(rank, size)
        self.ranks = ranks or tuple(range(size))
        self._place, self._traffic = rank, world.here().seat
        self._rank = self.ranks[rank]
        self._name, self._desc = "", ""
        self._block: list[Call] | None = None

    # What the group is.

    def getBackendName(self) -> str:
        return world.BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    @property
    def _key(self) -> tuple[str, tuple[int, ...]]:
        return self._name, self.ranks

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    # Reductions.

    def allreduce(self, tensors: Tensor | Tensors, opts: Any = None, timeout: Any = None) -> LockstepWork:
        tensors = _listed(tensors)
        return self._meet("all_reduce", tensors, tensors, opts, reduce_op=_reduce_op(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> LockstepWork:
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Tensor | Tensors, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> LockstepWork:
        tensors, root = _listed(tensors), _root(opts)
        outputs = tensors if root == self._place else []
        return self._meet("reduce", tensors, outputs, opts, reduce_op=_reduce_op(op or opts), root=root)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> LockstepWork:
        outputs, inputs = _listed(outputs), _nested(inputs)
        for output, parts in zip(outputs, inputs, strict=True):
            self._one_each("reduce_scatter", parts, output)
        flat = [part for parts in inputs for part in parts]
        return self._meet("reduce_scatter", flat, outputs, opts, reduce_op=_reduce_op(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> LockstepWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> LockstepWork:
        for output, whole in zip(outputs, inputs, strict=True):
            self._fits("reduce_scatter", "the input", whole, "output", output)

        def cut(copies: list[Tensor]) -> list[Tensor]:
            return [row for copy in copies for row in copy.reshape(self.size(), -1).unbind(0)]

        return self._meet("reduce_scatter", inputs, outputs, opts, cut, reduce_op=_reduce_op(opts))

    # Copies.

    def broadcast(self, tensors: Tensor | Tensors, opts: Any = None, timeout: Any = None) -> LockstepWork:
        tensors, root = _listed(tensors), _root(opts)
        outputs = [] if root == self._place else tensors
        return self._meet("broadcast", tensors, outputs, opts, root=root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> LockstepWork:
        outputs, inputs = _nested(outputs), _listed(inputs)
        for parts, one in zip(outputs, inputs, strict=True):
            self._one_each("all_gather", parts, one)
        return self._meet("all_gather", inputs, [part for parts in outputs for part in parts], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> LockstepWork:
        return self.allgather([[line[j] for line in outputs] for j in range(len(inputs))], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> LockstepWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> LockstepWork:
        for whole, one in zip(outputs, inputs, strict=True):
            self._fits("all_gather", "the output", whole, "input", one)
        return self._meet("all_gather", inputs, outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> LockstepWork:
        inputs, root = _listed(inputs), _root(opts)
        parts = _nested(outputs)[0] if root == self._place else []
        if root == self._place:
            self._one_each("gather", parts, inputs[0])
        return self._meet("gather", inputs, parts, opts, root=root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> LockstepWork:
        outputs, root = _listed(outputs), _root(opts)
        parts = _nested(inputs)[0] if root == self._place else []
        if root == self._place:
            self._one_each("scatter", parts, outputs[0])
        return self._meet("scatter", parts, outputs, opts, root=root)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None
    ) -> LockstepWork:
        for name, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self.size():
                raise ValueError(
                    f"all_to_all: {len(tensors)} {name}s for {self.size()} ranks; give one for each rank"
                )
        splits = (tuple(map(_rows, inputs)), tuple(map(_rows, outputs)))
        return self._meet("all_to_all", inputs, outputs, opts, splits=splits, expected=list(outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
        timeout: Any = None,
    ) -> LockstepWork:
        gives, takes = (
            self._splits("input", input, input_splits),
            self._splits("output", output, output_splits),
        )

        def cut(copies: list[Tensor]) -> list[Tensor]:
            return list(copies[0].split(gives))

        expected = list(output.data.split(takes))
        splits = (tuple(gives), tuple(takes))
        return self._meet("all_to_all", [input], [output], opts, cut, splits=splits, expected=expected)

    def barrier(self, opts: Any = None, timeout: Any = None) -> LockstepWork:
        return self._meet("barrier", [], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # Messages.

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> LockstepWork:
        return self._post("send", tensors, [], dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> LockstepWork:
        return self._post("recv", tensors, tensors, srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> LockstepWork:
        return self._post("recv", tensors, tensors, None, tag)

    # Blocks.

    def _start_coalescing(self, device: torch.device) -> None:
        self._block = []

    def _end_coalescing(self, device: torch.device) -> LockstepWork:
        calls, self._block = self._block or [], None
        return LockstepWork(self._traffic, calls)

    # The names of torch 2.11 and 2.12.

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

    # What this backend has not.

    def splitGroup(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("lockstep: split_group needs a device-bound backend; use new_group")

    def mergeRemoteGroup(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "lockstep: merge_remote_group joins processes, and there is one; use new_group"
        )

    split_group, merge_remote_group = splitGroup, mergeRemoteGroup

    # How a call is made.

    def _meet(
        self, op: str, inputs: Tensors, outputs: Tensors, opts: Any, cut: Cut | None = None, **details: Any
    ) -> LockstepWork:
        root, expected = details.pop("root", None), details.pop("expected", [])
        row = self._row(
            op,
            inputs,
            outputs,
            seq=self._traffic.next_seq(self._rank, self._key),
            root=None if root is None else self.ranks[root],
            is_async=getattr(opts, "asyncOp", True),
            **details,
        )
        call = Call(row, self._place, inputs, outputs, expected=expected, tracked=row.is_async)
        call.take(cut)
        self._traffic.meet(self._key, call)
        return self._work(call)

    def _post(self, op: str, tensors: Tensors, outputs: Tensors, peer: int | None, tag: int) -> LockstepWork:
        row = self._row(
            op,
            tensors,
            outputs,
            seq=self._traffic.next_seq(self._rank, (self._key, op)),
            peer=None if peer is None else self.ranks[peer],
            tag=tag,
        )
        call = Call(row, self._place, [] if outputs else tensors, outputs, tracked=True)
        call.take(None)
        self._traffic.post(self._key, call, peer)
        return self._work(call)

    def _work(self, call: Call) -> LockstepWork:
        if self._block is None:
            return LockstepWork(self._traffic, [call])
        self._block.append(call)
        return CollectedWork(self._traffic, [call])

    def _row(self, op: str, inputs: Tensors, outputs: Tensors, **details: Any) -> Row:
        sent = 0 if op == "recv" else sum(map(_bytes, inputs))
        return Row(
            rank=self._rank,
            op=op,
            group=tuple(sorted(self.ranks)),
            group_name=group_label(self._desc, self.ranks, self._traffic.axes),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in inputs),
            shapes=tuple(tuple(t.shape) for t in inputs),
            bytes_in=sent,
            bytes_out=sum(map(_bytes, outputs)),
            phase=phase(),
            source=call_site(),
            **details,
        )

    def _splits(self, name: str, whole: Tensor, splits: Sequence[int]) -> list[int]:
        rows, size = whole.shape[0] if whole.ndim else 1, self.size()
        if not splits:
            if rows % size:
                raise ValueError(
                    f"all_to_all: the {name} has {rows} rows, which {size} ranks cannot share; give splits"
                )
            return [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(
                f"all_to_all: {name} splits {list(splits)} for {rows} rows and {size} ranks do not add up"
            )
        return list(splits)

    def _one_each(self, op: str, parts: Tensors, one: Tensor) -> None:
        if len(parts) != self.size():
            raise ValueError(
                f"{op}: a list of {len(parts)} tensors for {self.size()} ranks; give one for each rank"
            )
        for part in parts:
            if part.shape != one.shape or part.dtype != one.dtype:
                raise ValueError(
                    f"{op}: {_what(part)} in the list and {_what(one)} beside it; all must be alike"
                )

    def _fits(self, op: str, whole_name: str, whole: Tensor, one_name: str, one: Tensor) -> None:
        if whole.numel() != one.numel() * self.size() or whole.dtype != one.dtype:
            raise ValueError(
                f"{op}: {whole_name} is {_what(whole)}, each of {self.size()} ranks' {one_name} is {_what(one)} "
                f"(needs {self.size()} times as many elements of one dtype)"
            )


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _nested(tensors: Any) -> list[list[Tensor]]:
    return [list(tensors)] if tensors and isinstance(tensors[0], Tensor) else [list(line) for line in tensors]


def _reduce_op(opts: Any) -> str:
    return name_of(dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _what(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
