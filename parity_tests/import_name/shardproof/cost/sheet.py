"""A sheet: the ranks of a host, the bandwidths inside and between hosts, and the latency of a message."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("sheets")
KINDS = ("ring", "tree")


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of a library for a collective: its share of the bandwidth, and the latency of its steps."""

    kind: str  # ring or tree; tree only for all_reduce
    protocol: str
    bandwidth_share: float
    call_seconds: float
    inside_seconds: float
    between_seconds: float


@dataclass(frozen=True)
class Sheet:
    """Hosts and links. Bandwidths are of one rank in one direction."""

    name: str
    ranks_per_host: int
    inside_bytes_per_second: float
    between_bytes_per_second: float
    algorithms: tuple[Algorithm, ...]
    message_seconds: float = 0.0  # for the sender, per posted message
    operations_per_second: float | None = None  # of matrix products; None if products take no time
    measured: str = "not yet measured"


def names() -> list[str]:
    """The built-in sheets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> Sheet:
    """A built-in sheet by name, or one from a TOML or JSON file. Errors: ValueError that names --links."""
    path = FOLDER / f"{name}.toml" if name in names() else Path(name)
    if not path.is_file():
        raise ValueError(f"--links {name} is neither a file nor a sheet; the sheets are {', '.join(names())}")
    text = path.read_text(encoding="utf-8-sig")
    try:
        record = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"--links {name}: cannot be read: {error}") from None
    try:
        return _sheet(record, path.stem)
    except ValueError as error:
        raise ValueError(f"--links {name}: {error}") from None


def _sheet(record: Mapping[str, Any], stem: str) -> Sheet:
    """A sheet from a file's record.

    Errors: ValueError for a missing or unknown key, or a value that is not a positive number.
    """
    valid_keys = {"name", "measured", "ranks_per_host", "operations_per_second", "message_seconds", "inside", "between"}
    _check_keys("", record, valid_keys | {"algorithms"}, {"ranks_per_host", "inside", "between", "algorithms"})
    for link in ("inside", "between"):
        _check_keys(f"{link}.", _table(record, link), {"bytes_per_second"}, {"bytes_per_second"})
    rows = record["algorithms"]
    if not isinstance(rows, list) or not rows:
        raise ValueError("algorithms has no row; give one of kind 'ring' at least")
    algorithms = tuple(_algorithm(row, f"algorithms[{number}].") for number, row in enumerate(rows))
    if not any(algorithm.kind == "ring" for algorithm in algorithms):
        raise ValueError("algorithms has no row of kind 'ring', which all ops except all_reduce need")
    ranks = record["ranks_per_host"]
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks_per_host is {ranks!r}; give a whole number of at least 1")
    operations = record.get("operations_per_second")
    return Sheet(
        name=str(record.get("name", stem)),
        ranks_per_host=ranks,
        inside_bytes_per_second=_number(record["inside"], "bytes_per_second", "inside.", is_positive=True),
        between_bytes_per_second=_number(record["between"], "bytes_per_second", "between.", is_positive=True),
        algorithms=algorithms,
        message_seconds=_number(record, "message_seconds", "", default=0.0),
        operations_per_second=operations and _number(record, "operations_per_second", "", is_positive=True),
        measured=str(record.get("measured", "not yet measured")),
    )


def _algorithm(row: Any, place: str) -> Algorithm:
    seconds = ("call_seconds", "inside_seconds", "between_seconds")
    keys = {"kind", "bandwidth_share", *seconds}
    if not isinstance(row, Mapping):
        raise ValueError(f"{place.rstrip('.')} is not a table of {', '.join(sorted(keys))}")
    _check_keys(place, row, keys | {"protocol"}, keys)
    if row["kind"] not in KINDS:
        raise ValueError(f"{place}kind is {row['kind']!r}; give one of {', '.join(KINDS)}")
    share = _number(row, "bandwidth_share", place, is_positive=True)
    if share > 1:
        raise ValueError(f"{place}bandwidth_share is {share}; give a part of 1")
    waits = [_number(row, key, place) for key in seconds]
    return Algorithm(row["kind"], str(row.get("protocol", "")), share, *waits)


def _table(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(record[name], Mapping):
        raise ValueError(f"{name} is {record[name]!r}; give a table with bytes_per_second")
    return record[name]


def _check_keys(place: str, record: Mapping[str, Any], valid_keys: set[str], required: set[str]) -> None:
    for key in sorted(required - set(record)):
        raise ValueError(f"{place}{key} is missing")
    for key in sorted(set(record) - valid_keys):
        raise ValueError(f"{place}{key} is not known; the keys are {', '.join(sorted(valid_keys))}")


def _number(
    record: Mapping[str, Any], key: str, place: str, *, default: float | None = None, is_positive: bool = False
) -> float:
    value = record.get(key, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (is_positive and value == 0):
        raise ValueError(f"{place}{key} is {value!r}; give a {'positive ' if is_positive else ''}number")
    return float(value)
