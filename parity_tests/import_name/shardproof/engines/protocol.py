"""The protocol check: do the ranks' ledgers fit together, row by row?

It reads only the ledger, so it serves every engine, also when all ranks succeed: gloo returns wrong numbers without an
error if dtypes, reduce ops, or shapes of the same size differ.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardproof.declare.case import CaseSpec
from shardproof.declare.counted import counted
from shardproof.engines.failure import CollectiveMismatch
from shardproof.engines.ledger import MESSAGES, CallSite, Finding, Ledger, LedgerRow


@dataclass(frozen=True)
class Disagreement:
    """Rows that do not fit together: the `row` that differs, and one sentence for each other rank involved."""

    what: str
    row: LedgerRow
    others: Mapping[int, str]

    def __str__(self) -> str:
        return f"{self.what}: rank {self.row.rank} issued {self.row}"

    @property
    def finding(self) -> Finding:
        """The sentence, which blames the row."""
        return Finding(str(self), (CallSite.of(self.row),))

    def failure(
        self, case: CaseSpec | None, ledger: Ledger, states: Mapping[int, str] | None = None
    ) -> CollectiveMismatch:
        """The failure to raise; `states` has a sentence for each rank that is not involved."""
        row = self.row
        rest = {rank: state for rank, state in (states or {}).items() if rank != row.rank}
        others = [sentence for _, sentence in sorted((rest | dict(self.others)).items())]
        return CollectiveMismatch(
            str(self), rank=row.rank, op=row.op, source=row.source, case=case, others=others, ledger=ledger
        )


def disagreement(ledger: Ledger, *, complete: bool = True) -> Disagreement | None:
    """The first rows that do not fit together, or None.

    `complete=False` is for ranks that were stopped early: missing rows are accepted, and only rows that all
    participants have issued are compared.
    """
    place = {id(row): index for rank in {r.rank for r in ledger.rows} for index, row in enumerate(ledger.of(rank))}
    differences = [*_collectives(ledger, complete), *_messages(ledger, complete)]
    return min(differences, key=lambda d: (place[id(d.row)], d.row.rank), default=None)


def crossed(waiting: Mapping[int, LedgerRow], ledger: Ledger) -> Disagreement | None:
    """Two waiting ranks, each in a collective that the other should have joined and has not issued."""
    issued = Counter((row.rank, row.group, row.group_name) for row in ledger.rows if row.op not in MESSAGES)

    def lacks(rank: int, row: LedgerRow) -> bool:
        return row.op not in MESSAGES and rank in row.group and issued[rank, row.group, row.group_name] <= row.seq

    for rank, row in waiting.items():
        for other, other_row in waiting.items():
            if lacks(other, row) and lacks(rank, other_row):
                return _against("group differs", other_row, [row, other_row])
    return None


def _collectives(ledger: Ledger, complete: bool) -> Iterator[Disagreement]:
    """At most one per group: the first."""
    groups: dict[tuple, dict[int, list[LedgerRow]]] = {}
    for row in ledger.rows:
        if row.op not in MESSAGES:
            key = (row.group, row.group_name)
            groups.setdefault(key, {rank: [] for rank in row.group}).setdefault(row.rank, []).append(row)
    for lists in groups.values():
        for index in range(max(map(len, lists.values()))):
            issued = {rank: rows[index] for rank, rows in lists.items() if index < len(rows)}
            silent = [rank for rank in lists if rank not in issued] if complete else []
            problem = _difference(issued) or _missing_ranks(issued, silent, lists)
            if problem is not None:
                yield problem
                break


def _difference(issued: Mapping[int, LedgerRow]) -> Disagreement | None:
    """The first property that differs between the rows at one place of a group."""
    rows = list(issued.values())
    # If one rank passes more tensors than another, the shapes show it.
    fewest = 1 if rows[0].op == "all_to_all" else min((len(row.dtypes) for row in rows if row.dtypes), default=0)
    properties = {
        "op": [row.op for row in rows],
        "member list": [row.members for row in rows],
        "reduce op": [row.reduce_op for row in rows],
        "root": [row.root for row in rows],
        "dtype": [row.dtypes[:fewest] or None for row in rows],
        "shape": [_common_shapes(row) for row in rows],
    }
    for name, values in properties.items():
        numbers = [value for value in values if value is not None]
        if len(set(numbers)) > 1:
            usual = Counter(numbers).most_common(1)[0][0]
            odd = next(row for row, value in zip(rows, values, strict=True) if value not in (usual, None))
            return _against(f"{name} differs", odd, rows)
    return _splits(rows) if all(row.splits for row in rows) else _pieces(rows) if rows[0].op == "scatter" else None


def _common_shapes(row: LedgerRow) -> object:
    """The shape that must be equal on all ranks; for a tensor that is split by rows, the shape of one row."""
    if row.op == "all_gather" and row.splits:  # of unlike tensors: entry r of each list is of rank r's shape
        return None
    if row.splits or row.op == "all_to_all":
        return row.shapes[0][1:] if len(row.shapes) == 1 and math.prod(row.shapes[0]) else None
    return None if row.op == "scatter" else row.shapes


def _splits(rows: Sequence[LedgerRow]) -> Disagreement | None:
    """For every pair of ranks, i sends j as many rows as j expects from i."""
    for a in rows:
        for b in rows:
            if a.splits is None or b.splits is None:
                continue
            sent, expected = a.splits[0][a.group.index(b.rank)], b.splits[1][b.group.index(a.rank)]
            if sent != expected:
                sends = f"rank {a.rank} sends {counted(sent, 'row')} to rank {b.rank}"
                what = f"splits differ: {sends}, which expects {expected}"
                return _against(what, a, rows)
    return None


def _pieces(rows: Sequence[LedgerRow]) -> Disagreement | None:
    """Every receiver of a scatter must expect as many bytes as the root sends it."""
    root = next((row for row in rows if row.rank == row.root), None)
    for row in rows:
        if root is not None and row.bytes_out != root.bytes_out:
            return _against(
                f"size differs: rank {row.rank} expects {counted(row.bytes_out, 'byte')} of the scatter", row, rows
            )
    return None


def _missing_ranks(
    issued: Mapping[int, LedgerRow], silent: Sequence[int], lists: Mapping[int, list[LedgerRow]]
) -> Disagreement | None:
    if not silent or not issued:
        return None
    odd = next(iter(issued.values()))
    others = {rank: _sentence(row) for rank, row in issued.items() if row is not odd}
    for rank in silent:
        last = f"nothing more in this group after {lists[rank][-1]}" if lists[rank] else "nothing in this group"
        others[rank] = f"rank {rank} issued {last}"
    return Disagreement("not all ranks took part", odd, others)


def _messages(ledger: Ledger, complete: bool) -> Iterator[Disagreement]:
    """The k-th send between two ranks with one tag matches the k-th recv."""
    pairs: dict[tuple, tuple[list[LedgerRow], list[LedgerRow]]] = defaultdict(lambda: ([], []))
    anyone = {(row.group_name, row.rank) for row in ledger.rows if row.op == "recv" and row.peer is None}
    for row in ledger.rows:
        if row.op in MESSAGES and row.peer is not None:
            source, target = (row.rank, row.peer) if row.op == "send" else (row.peer, row.rank)
            if (row.group_name, target) not in anyone:  # a receive from any rank has no fixed partner
                pairs[row.group, row.group_name, source, target, row.tag][row.op == "recv"].append(row)
    for (*_, source, target, _), (sends, recvs) in pairs.items():
        for send, recv in zip(sends, recvs, strict=False):
            if (send.dtypes, send.shapes) != (recv.dtypes, recv.shapes):
                name = "dtype" if send.dtypes != recv.dtypes else "shape"
                yield _against(f"{name} differs", recv, (send, recv))
                break
        else:
            if complete and len(sends) != len(recvs):
                unmatched = max(sends, recvs, key=len)[min(len(sends), len(recvs))]
                missing_half = {target: f"rank {target} posted no recv for it"}
                if unmatched.op == "recv":
                    missing_half = {source: f"rank {source} sent nothing for it"}
                yield Disagreement("message without its other half", unmatched, missing_half)


def _against(what: str, odd: LedgerRow, rows: Sequence[LedgerRow]) -> Disagreement:
    return Disagreement(what, odd, {row.rank: _sentence(row) for row in rows if row is not odd})


def _sentence(row: LedgerRow) -> str:
    return f"rank {row.rank} issued {row}"


def of_returned(rank: int, rows: Sequence[LedgerRow], awaited: LedgerRow | None = None) -> str:
    """`rank 1 returned without this all_reduce; its last was ...`.

    Another rank waits in the call `awaited`.
    """
    without = ""
    if awaited is not None and awaited.peer is None and rank in awaited.group:
        places = [(row.group, row.group_name, row.seq) for row in rows if row.peer is None]
        if (awaited.group, awaited.group_name, awaited.seq) not in places:
            without = f" without this {awaited.op}"
    return f"rank {rank} returned{without}" + (f"; its last was {rows[-1]}" if rows else "")
