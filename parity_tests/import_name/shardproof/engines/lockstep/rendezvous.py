"""Matches calls: the n-th collective of a group, and messages between two of its ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from torch import Tensor

from shardproof.engines.ledger import LedgerRow
from shardproof.engines.lockstep.call import CommunicationCall
from shardproof.engines.lockstep.operations import combined, described


class CallsDiffer(Exception):
    """Two calls of one rendezvous that do not fit together."""

    def __init__(self, what: str, first: LedgerRow, second: LedgerRow) -> None:
        super().__init__(f"{what}: rank {first.rank} in {first}; rank {second.rank} in {second}")
        self.first, self.second = first, second


class Rendezvous:
    """The calls with one sequence number in one group."""

    def __init__(self, size: int) -> None:
        self._calls: list[CommunicationCall | None] = [None] * size
        self._missing = size

    def arrive(self, call: CommunicationCall) -> list[CommunicationCall]:
        """Add one rank's call; the last to arrive gets all calls with their results, the others an empty list."""
        arrived = [other for other in self._calls if other is not None]
        # Splits are checked against every rank, including this one; other properties must be equal, so one rank is
        # enough.
        for other in [*arrived, call] if call.row.splits else arrived[:1]:
            _agree(other, call)
        self._calls[call.place] = call
        self._missing -= 1
        if self._missing:
            return []
        calls = [c for c in self._calls if c is not None]
        for each, results in zip(calls, _results(calls), strict=True):
            each.results = results
        return calls


def _agree(first: CommunicationCall, second: CommunicationCall) -> None:
    a, b = first.row, second.row
    if a.op != b.op:
        raise CallsDiffer("different operations meet", a, b)
    if a.root != b.root:
        raise CallsDiffer(f"roots differ, {a.root} and {b.root}", a, b)
    if a.op == "scatter":
        _same_outputs(first, second)
    elif a.op == "all_to_all":
        _pair(first, second)
        _pair(second, first)
    else:
        if a.dtypes != b.dtypes:
            raise CallsDiffer(f"dtypes differ, {', '.join(a.dtypes)} and {', '.join(b.dtypes)}", a, b)
        if a.splits and b.splits:
            _pair(first, second)
            _pair(second, first)
        elif a.shapes != b.shapes:
            raise CallsDiffer(f"shapes differ, {_shapes(a)} and {_shapes(b)}", a, b)
    if a.reduce_op != b.reduce_op:
        raise CallsDiffer(f"reduce ops differ, {a.reduce_op} and {b.reduce_op}", a, b)


def _same_outputs(first: CommunicationCall, second: CommunicationCall) -> None:
    for one, other in zip(first.outputs, second.outputs, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise CallsDiffer(f"outputs differ, {described(one)} and {described(other)}", first.row, second.row)


def _pair(sender: CommunicationCall, receiver: CommunicationCall) -> None:
    sent = sender.pieces[0] if sender.row.op == "all_gather" else sender.pieces[receiver.place]
    expected = receiver.expected[sender.place]
    if (sent.shape, sent.dtype) != (expected.shape, expected.dtype):
        raise CallsDiffer(
            f"splits disagree, rank {sender.row.rank} sends {described(sent)} to rank {receiver.row.rank}, which "
            f"expects {described(expected)}",
            sender.row,
            receiver.row,
        )


def _results(calls: Sequence[CommunicationCall]) -> list[list[Tensor]]:
    """For each place in the group, the tensors to write into its outputs."""
    row, size = calls[0].row, len(calls)
    if row.op == "barrier":
        return [[] for _ in calls]
    op = row.reduce_op or "SUM"
    if row.op in ("all_reduce", "reduce"):
        totals = [combined(op, addends) for addends in zip(*(call.pieces for call in calls), strict=True)]
        return [totals if call.outputs else [] for call in calls]
    if row.op == "reduce_scatter":
        blocks = range(0, len(calls[0].pieces), size)
        return [[combined(op, [c.pieces[b + p] for c in calls]) for b in blocks] for p in range(size)]
    if row.op in ("all_gather", "gather"):
        count = len(calls[0].pieces)
        pieces = [call.pieces[j] for j in range(count) for call in calls]
        return [pieces if call.outputs else [] for call in calls]
    if row.op == "all_to_all":
        return [[call.pieces[place] for call in calls] for place in range(size)]
    root = next(call for call in calls if call.row.rank == row.root)
    if row.op == "broadcast":
        return [root.pieces if call.outputs else [] for call in calls]
    return [[root.pieces[place]] for place in range(size)]  # scatter


def _shapes(row: LedgerRow) -> str:
    return " ".join(str(list(shape)) for shape in row.shapes)


class MessageQueues:
    """The unmatched messages of one group, in order of posting; places are positions in the group.

    As in NCCL, a send is complete when its receive is posted.
    """

    def __init__(self) -> None:
        self._sends: dict[tuple[int, int], deque[CommunicationCall]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[CommunicationCall]] = defaultdict(deque)
        self._open: dict[int, deque[CommunicationCall]] = defaultdict(deque)  # receives from any rank

    def send(self, call: CommunicationCall, target: int) -> CommunicationCall | None:
        """Post a send; returns the matching receive if it is already posted."""
        waiting = self._receives[call.place, target] or self._open[target]
        if waiting:
            return _deliver(call, waiting.popleft())
        self._sends[call.place, target].append(call)
        return None

    def receive(self, call: CommunicationCall, origin: int | None) -> CommunicationCall | None:
        """Post a receive (`origin` None: from any rank); returns the matching send if it is already posted."""
        if origin is None:
            lines = [line for (_, target), line in self._sends.items() if target == call.place and line]
            waiting = min(lines, key=lambda line: line[0].order, default=None)
            if not waiting:
                self._open[call.place].append(call)
                return None
        else:
            waiting = self._sends[origin, call.place]
            if not waiting:
                self._receives[origin, call.place].append(call)
                return None
        send = waiting.popleft()
        _deliver(send, call)
        return send


def _deliver(send: CommunicationCall, receive: CommunicationCall) -> CommunicationCall:
    a, b = send.row, receive.row
    if a.tag != b.tag:
        raise CallsDiffer(f"tags differ, {a.tag} and {b.tag}", a, b)
    if a.dtypes != b.dtypes:
        raise CallsDiffer(f"dtypes differ, {a.dtypes[0]} and {b.dtypes[0]}", a, b)
    if a.shapes != b.shapes:
        raise CallsDiffer(f"shapes differ, {list(a.shapes[0])} and {list(b.shapes[0])}", a, b)
    receive.results = send.copies
    receive.origin = send.place
    return receive
