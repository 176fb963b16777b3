"""The rows of a ledger as steps, each with the blocks that its ranks hand to each other.

A step shows the operation and not the algorithm: in an all-gather each rank hands its block to every other, whether
over a ring or a tree. In a reduction all ranks hand their blocks to a sum, and the sum goes to the ranks that receive
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardproof.engines.ledger import MESSAGES, Ledger, LedgerRow


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank hands to another or to itself; `None` is the sum over the group.

    In a reduce-scatter and a reduce, blocks are summed at their target.
    """

    source: int | None
    target: int | None
    size: int
    group: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One collective of one group, the same collective of parallel groups, or messages sent at the same time."""

    rows: tuple[LedgerRow, ...]
    transfers: tuple[Transfer, ...]

    @property
    def phase(self) -> str:
        return self.rows[0].phase

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of a group that did not issue it."""
        ranks = {row.rank for row in self.rows}
        groups = {rank for row in self.rows if row.op not in MESSAGES for rank in row.group}
        return tuple(sorted(groups - ranks))


def steps(ledger: Ledger) -> list[Step]:
    """The steps in an order that matches every rank's order, if the ranks agree on one."""
    by_key: dict[object, list[LedgerRow]] = {}
    keys = _keys(ledger.rows)
    for row in ledger.rows:
        by_key.setdefault(keys[id(row)], []).append(row)
    numbers = {key: number for number, key in enumerate(by_key)}
    steps_of_keys = [Step(tuple(rows), tuple(_transfers(rows))) for rows in by_key.values()]
    return [steps_of_keys[number] for number in _order(ledger.rows, {row: numbers[key] for row, key in keys.items()})]


def _keys(rows: Sequence[LedgerRow]) -> dict[int, object]:
    """The key of the step that each row (by its id) belongs to."""
    by_collective: dict[tuple[object, ...], list[LedgerRow]] = defaultdict(list)
    for row in rows:
        if row.op not in MESSAGES:
            by_collective[row.group, row.group_name, row.seq].append(row)
    keys: dict[int, object] = {}
    for collective, of_one in by_collective.items():
        common = {(row.phase, row.op, row.source, row.group_name, row.seq) for row in of_one}
        # The groups of one axis are one step, unless the ranks of one group disagree.
        keys |= {id(row): common.copy().pop() if len(common) == 1 else collective for row in of_one}
    return keys | _message_keys(rows)


def _message_keys(rows: Sequence[LedgerRow]) -> dict[int, object]:
    """A send and its receive are one step; so is a shift: each rank sends once and receives once."""
    sends: dict[tuple[object, ...], list[LedgerRow]] = defaultdict(list)
    receives: dict[tuple[object, ...], list[LedgerRow]] = defaultdict(list)
    shifts: dict[tuple[object, ...], list[tuple[LedgerRow, ...]]] = defaultdict(list)
    keys: dict[int, object] = {}
    for row in rows:
        if row.op in MESSAGES:
            ends = (row.rank, row.peer) if row.op == "send" else (row.peer, row.rank)
            (sends if row.op == "send" else receives)[row.group, row.group_name, *ends, row.tag].append(row)
    for key in {**sends, **receives}:
        paired = min(len(sends[key]), len(receives[key]))
        for halves in zip(sends[key], receives[key], strict=False):
            send = halves[0]
            shifts[send.phase, send.source, send.group, send.group_name, send.seq].append(halves)
        keys |= {id(row): id(row) for row in (*sends[key][paired:], *receives[key][paired:])}
    for shift, pairs in shifts.items():
        is_shift = {send.rank for send, _ in pairs} == {recv.rank for _, recv in pairs} and len(pairs) > 1
        keys |= {id(row): (shift if is_shift else id(pair[0])) for pair in pairs for row in pair}
    return keys


def _order(rows: Iterable[LedgerRow], number_of: Mapping[int, int]) -> Iterator[int]:
    """Yield each step once all its ranks have reached it; in a deadlock, where none qualifies, the first issued."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        waiting[row.rank].append(number_of[id(row)])
    queues = [list(dict.fromkeys(numbers)) for numbers in waiting.values()]
    while queues := [queue for queue in queues if queue]:
        first = {queue[0] for queue in queues}
        blocked = {number for queue in queues for number in queue[1:]}
        number = min(first - blocked or first)
        yield number
        for queue in queues:
            if number in queue:
                queue.remove(number)


def _transfers(rows: Sequence[LedgerRow]) -> Iterator[Transfer]:
    """The transfers between ranks; none for a collective that some rank did not issue or that the ranks disagree on."""
    groups: dict[tuple[int, ...], list[LedgerRow]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    for group, of_group in groups.items():
        if of_group[0].op in MESSAGES:
            yield from (Transfer(row.rank, row.peer, row.payload, group) for row in of_group if row.op == "send")
        elif {row.rank for row in of_group} == set(group) and len({_what(row) for row in of_group}) == 1:
            for row in of_group:
                yield from _handed(row, {other.rank: other for other in of_group})


def _what(row: LedgerRow) -> tuple[object, ...]:
    """Properties that all rows of a valid collective share; blocks of a gather may differ in length."""
    return row.op, row.dtypes, row.reduce_op, row.root, row.shapes if row.op == "all_reduce" else None


def _handed(row: LedgerRow, rows: Mapping[int, LedgerRow]) -> Iterator[Transfer]:
    """Transfers of one rank to the participants, or from the sum."""
    size, group = row.payload, row.group
    if row.op == "all_reduce":
        yield Transfer(row.rank, None, size, group)
        yield Transfer(None, row.rank, size, group)
    elif row.op == "all_gather":
        yield from (Transfer(row.rank, other, size, group) for other in rows)
    elif row.op == "all_to_all":
        shares = row.splits[0] if row.splits else (1,) * len(group)
        for other, share in zip(group, shares, strict=True):
            if other in rows:
                yield Transfer(row.rank, other, size * share // max(sum(shares), 1), group)
    elif row.op == "reduce_scatter":
        yield from (Transfer(row.rank, other, rows[other].bytes_out, group) for other in rows)
    elif row.op in ("gather", "reduce") and row.root in rows:
        yield Transfer(row.rank, row.root, size, group)
    elif row.op in ("broadcast", "scatter") and row.root in rows and (row.op == "scatter" or row.rank != row.root):
        yield Transfer(row.root, row.rank, row.bytes_out, group)
