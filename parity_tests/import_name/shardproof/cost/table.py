"""A comparison as text of 80 columns, and as JSON."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof.cost.candidates import PHASES, Candidate, Comparison
from shardproof.cost.placement import hosts_of
from shardproof.cost.sheet import Sheet

SHORT = {"forward": "fwd", "backward": "bwd"}
WIDTH = 80
MOST_SHOWN = 3  # candidates; with more, only the fastest shows its ops
NOTES = (
    "calls and bytes: as the ledger counts them, what one rank hands in",
    "inside, between: what the busiest rank sends inside its host, and to others",
    "step: products, and the time that they do not hide; messages overlap with",
    "  products, collectives do not",
)


def communication(candidate: Candidate) -> float:
    """Seconds of all ops, forward and backward, without overlap."""
    return sum(candidate.communication(phase) for phase in PHASES)


AMOUNTS: dict[str, Callable[[Candidate], float]] = {
    "time of a step": lambda candidate: candidate.seconds,
    "time of its communication": communication,
    "bytes of its busiest rank between hosts": lambda candidate: candidate.between,
}


def one_mesh(comparison: Comparison) -> str:
    """The candidates on one mesh, with all their ops; if there are many, only the fastest candidate's ops."""
    setting, every = comparison.setting, comparison.candidates
    parts = [_head(setting.mesh, setting.sheet)]
    if len(every) > 1:
        parts.append(_summary(comparison))
    detail = every if len(every) <= MOST_SHOWN or comparison.least is None else [comparison.least]
    parts += [_candidate(candidate) for candidate in detail]
    if len(detail) < len(every):
        parts.append("the ops of the others: --json")
    left_out = {f"not {name}": reason for name, reason in comparison.left_out.items()}
    return "\n\n".join([*parts, *_reasons(left_out), "\n".join(NOTES)])


def several_meshes(comparisons: Sequence[Comparison]) -> str:
    """Tables with one line per mesh: step and communication of each way, from its cheapest candidate; and bytes."""
    axis, ways = swept_axis(comparisons), ways_of(comparisons)
    tables = {title: [[axis, "hosts", *ways, "least"]] for title in AMOUNTS}
    for one, (title, amount) in itertools.product(comparisons, AMOUNTS.items()):
        mesh = one.setting.mesh
        chosen = [best(one, way, amount) for way in ways]
        cheapest = min((each for each in chosen if each), key=amount, default=None)
        text_of = _bytes if title.startswith("bytes") else _time
        cells = [text_of(amount(each)) if each else "-" for each in chosen]
        hosts = hosts_of(mesh, one.setting.sheet.ranks_per_host)
        mark = cheapest.label if cheapest and amount(cheapest) else "-"
        tables[title].append([f"{mesh[axis]:,}", f"{hosts:,}", *cells, mark])
    texts = [f"{title}\n{_columns(rows, left=(len(ways) + 2,))}" for title, rows in tables.items()]
    head = _sweep_head(comparisons, axis)
    return "\n\n".join([head, *texts, *_absent(comparisons, axis), "\n".join(NOTES[2:])])


def swept_axis(comparisons: Sequence[Comparison]) -> str:
    """The axis whose size differs between comparisons; for a single mesh, its first axis."""
    first, last = comparisons[0].setting.mesh, comparisons[-1].setting.mesh
    return next((axis for axis in first if first[axis] != last[axis]), next(iter(first)))


def ways_of(comparisons: Sequence[Comparison]) -> list[str]:
    """The names of ways on any mesh: candidates that differ in later words, as `usp heads=8`, are one way."""
    return list(dict.fromkeys(_way(each.label) for one in comparisons for each in one.candidates))


def best(comparison: Comparison, way: str, amount: Callable[[Candidate], float]) -> Candidate | None:
    """The candidate of a way with the least amount; None if no candidate has a price for all ops."""
    of_way = [each for each in comparison.candidates if _way(each.label) == way and each.is_complete]
    return min(of_way, key=amount, default=None)


def _absent(comparisons: Sequence[Comparison], axis: str) -> list[str]:
    """Ways without any candidate, with the reason."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for one in comparisons:
        there = {_way(each.label) for each in one.candidates}
        for label, reason in one.left_out.items():
            if _way(label) not in there:
                sizes.setdefault((_way(label), reason), []).append(f"{one.setting.mesh[axis]}")
    texts = [f"no {way} on {axis}={','.join(dict.fromkeys(each))}: {reason}" for (way, reason), each in sizes.items()]
    return ["\n".join(line for text in texts for line in _wrapped(text))] if texts else []


def as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Comparisons on one sheet, JSON-ready; bytes on links and seconds are null for an op without a price."""
    sheet = comparisons[0].setting.sheet
    links = {"name": sheet.name, "ranks_per_host": sheet.ranks_per_host, "measured": sheet.measured}
    return {"links": links, "comparisons": [_record(comparison) for comparison in comparisons]}


def _record(comparison: Comparison) -> dict[str, Any]:
    setting = comparison.setting
    return {
        "mesh": dict(setting.mesh),
        "ranks": math.prod(setting.mesh.values()),
        "hosts": hosts_of(setting.mesh, setting.sheet.ranks_per_host),
        "least": comparison.least.label if comparison.least else None,
        "candidates": [_candidate_record(candidate) for candidate in comparison.candidates],
        "left_out": comparison.left_out,
    }


def _candidate_record(candidate: Candidate) -> dict[str, Any]:
    case = candidate.case
    lines = [
        {
            "phase": line.phase,
            "op": line.op,
            "axis": line.axis,
            "calls": line.calls,
            "bytes": line.size,
            "inside_bytes": line.price and line.price.inside,
            "between_bytes": line.price and line.price.between,
            "seconds": line.price and line.price.seconds,
        }
        for line in candidate.lines
    ]
    return {
        "label": candidate.label,
        "scheme": candidate.scheme,
        "mesh": dict(candidate.mesh),
        "dims": dict(case.dims),
        "dtype": case.dtype,
        "options": dict(case.options),
        "drawn": candidate.seed,
        "lines": lines,
        "inside_bytes": candidate.inside,
        "between_bytes": candidate.between,
        "products": candidate.products,
        "communication_seconds": {phase: candidate.communication(phase) for phase in PHASES},
        "product_seconds": dict(candidate.product_seconds),
        "seconds": candidate.seconds if candidate.is_complete else None,
    }


# Parts of the text


def _head(mesh: Mapping[str, int], sheet: Sheet) -> str:
    ranks, hosts = math.prod(mesh.values()), hosts_of(mesh, sheet.ranks_per_host)
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.items())
    count = f"{hosts:,} host{'s' * (hosts > 1)} of {sheet.ranks_per_host}"
    return f"{sizes}: {ranks:,} rank{'s' * (ranks > 1)}, {count}\nlinks {sheet.name}, {sheet.measured}"


def _sweep_head(comparisons: Sequence[Comparison], axis: str) -> str:
    first, last = comparisons[0].setting, comparisons[-1].setting
    other_axes = "".join(f" {name}={size}" for name, size in first.mesh.items() if name != axis)
    dims = [
        f"{name}={size}" if size == last.names[name] else f"{name}={size}..{last.names[name]}"
        for name, size in first.names.items()
    ]
    sheet = first.sheet
    head = f"{axis}={first.mesh[axis]}..{last.mesh[axis]}{other_axes}, hosts of {sheet.ranks_per_host}"
    return "\n".join([*_wrapped(f"{head}: {' '.join(dims)}"), f"links {sheet.name}, {sheet.measured}"])


def _candidate(candidate: Candidate) -> str:
    case = candidate.case
    name = candidate.label if candidate.label == candidate.scheme else f"{candidate.label}: {candidate.scheme}"
    sizes = {**candidate.mesh, **case.dims, **case.options}
    head = _wrapped(f"{name} {case.dtype} {' '.join(f'{key}={value}' for key, value in sizes.items())}")
    note = [f"  {text}" for text in _layout_notes(candidate)]
    if not candidate.lines:
        return "\n".join([*head, *note, "  sends nothing"])
    rows = [["", "op", "calls", "bytes", "inside", "between", "time"]]
    for line in candidate.lines:
        cost = line.price
        links = [_bytes(cost.inside), _bytes(cost.between), _time(cost.seconds)] if cost else ["-", "-", "-"]
        rows.append([SHORT[line.phase], line.name, f"{line.calls:,}", f"{line.size:,}", *links])
    note += [] if candidate.is_complete else ["  -: the cost does not say over which axis, as in 'all_gather/tp'"]
    return "\n".join([*head, *note, _columns(rows, left=(0, 1)), *_totals(candidate)])


def _layout_notes(candidate: Candidate) -> list[str]:
    """Notes on the lengths that the cost assumes, if shards or sequences may have other lengths."""
    case = candidate.case
    is_ragged = any("lengths" in record for record in case.layouts.values())
    standard = {"shards": "DTensor's" * is_ragged, "sequences": "one has all" * bool(case.lengths)}
    how = "the standard case" if candidate.seed is None else f"drawn by --seed {candidate.seed}"
    return [
        f"lengths of {what}: {how}{f', {lengths}' if candidate.seed is None else ''}"
        for what, lengths in standard.items()
        if lengths
    ]


def _totals(candidate: Candidate) -> list[str]:
    texts = []
    for phase in PHASES:
        parts = [f"communication {_time(candidate.communication(phase))}"]
        if candidate.product_seconds:
            parts.append(f"products {_time(candidate.product_seconds[phase])}")
            parts.append(f"step {_time(candidate.step(phase))}")
        texts.append(f"  {SHORT[phase]} {', '.join(parts)}")
    return texts if candidate.is_complete else []


def _summary(comparison: Comparison) -> str:
    cheapest = comparison.least
    rows = [["", "inside", "between", "communication", "products", "step", ""]]
    for each in comparison.candidates:
        products = _time(sum(each.product_seconds.values())) if each.product_seconds else "-"
        mark = "least" if each is cheapest else ""
        rows.append(
            [
                each.label,
                _bytes(each.inside),
                _bytes(each.between),
                _time(communication(each)),
                products,
                _step(each),
                mark,
            ]
        )
    return f"forward and backward together\n{_columns(rows, left=(0, 6))}"


def _step(candidate: Candidate) -> str:
    return _time(candidate.seconds) if candidate.is_complete else "-"


def _way(label: str) -> str:
    """The way that a label belongs to: `usp` for `usp heads=8`."""
    return label.partition(" ")[0]


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    """Why a name has no candidate; names with the same reason are grouped."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    texts = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return ["\n".join(line for text in texts for line in _wrapped(text))] if texts else []


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _columns(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    cells = [
        [cell.ljust(widths[at]) if at in left else cell.rjust(widths[at]) for at, cell in enumerate(row)]
        for row in rows
    ]
    return "\n".join(f"  {'  '.join(row)}".rstrip() for row in cells)


def _bytes(count: float) -> str:
    return _scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def _time(seconds: float) -> str:
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Three digits in the largest unit that gives at least 1."""
    if number == 0:
        return "0"
    unit, name = next(((unit, name) for unit, name in units if number >= unit), units[-1])
    return f"{number / unit:#.3g}".rstrip(".") + f" {name}"
