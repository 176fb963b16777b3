"""A ledger summed by module: the collectives and bytes of each part of a model, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable

from shardproof.engines.ledger import Ledger, LedgerRow

OUTSIDE = "(no module)"
HEADS = ("module", "phase", "op", "group", "calls", "bytes")
Key = tuple[str, str, str]  # phase, op, group
Sums = dict[Key, tuple[int, int]]


def by_module(rows: Iterable[LedgerRow]) -> dict[str, Sums]:
    """{module: {(phase, op, group): (calls, bytes)}} in the order of first issue; a module includes its parts.

    Collectives issued outside any module are under the empty name.
    """
    sums: dict[str, Sums] = {}
    for row in rows:
        key = (row.phase, row.op, row.group_name)
        for module in _with_parents(row.module):
            calls, size = sums.setdefault(module, {}).get(key, (0, 0))
            sums[module][key] = (calls + 1, size + row.payload)
    return sums


def table(ledger: Ledger, rank: int | None = None) -> str:
    """Collectives and bytes by module, phase and group, as text; bytes count the input of one rank.

    A module's numbers include its parts, which are indented below it. `rank` selects one rank of the ledger; the
    default is the ledger's first rank.
    """
    ranks = sorted({row.rank for row in ledger.rows})
    if not ranks:
        return "no collectives"
    if rank is not None and rank not in ranks:
        raise ValueError(f"ledger_table: rank {rank} has issued nothing; there are {', '.join(map(str, ranks))}")
    sums = by_module(ledger.of(ranks[0] if rank is None else rank))
    lines: list[tuple[str, ...]] = [HEADS]
    for module in _in_tree_order(sums):
        label = "  " * module.count(".") + module.rpartition(".")[2] if module else OUTSIDE
        for (phase, op, group), (calls, size) in sorted(sums[module].items(), key=lambda item: item[0][0] == "bwd"):
            lines.append((label, phase, op, group, f"{calls:,}", f"{size:,}"))
            label = ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:4], widths[:4], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[4:], widths[4:], strict=True)]
    return "  ".join([*left, *right]).rstrip()


def _with_parents(module: str) -> list[str]:
    """`A.b.c` as A, A.b, A.b.c."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _in_tree_order(sums: dict[str, Sums]) -> list[str]:
    """Each module before its parts, siblings in the order of first issue."""
    order = list(sums)
    places = {module: [order.index(parent) for parent in _with_parents(module)] for module in order}
    return sorted(order, key=lambda module: places[module])
