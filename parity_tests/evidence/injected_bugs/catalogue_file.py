"""Reads a file of the catalogue: injected bugs as short diffs.

    ## A comment: a common property of the next entries, or why the next one is there
    # local mean not divided by its sum [scale] value: off by the factor 2
    @@ vocab_parallel:_mean
    source: TrainVerify
    - total / count
    + total / count * 2

An entry begins with its name, its kind in brackets, and the report that is expected. The place follows, then the
optional fields of `InjectedBug`, a line each, then the old text and the new one, line by line and with their
indentation. A text whose last line is an empty `-` or `+` ends with the end of a line. Without `+` the new text is
empty. Empty lines may stand anywhere.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TypeVar

from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug

HEADER = re.compile(r"# (?P<name>.+) \[(?P<kind>[^][]*)\] (?P<expect>\S.*)")
LINE = re.compile(r"(?:(?P<sign>[-+])(?: (?P<code>.*))?|(?P<field>@@|[a-z_]+:)(?: (?P<value>.*))?)")
TEXTS = {"-": "old", "+": "new"}
OPTIONAL = {f"{field.name}:": field.name for field in fields(InjectedBug) if field.default is not MISSING}
FIELDS = {"@@": "at", **OPTIONAL}
Bug = TypeVar("Bug", bound=InjectedBug)


def read(path: Path, of: type[Bug] = InjectedBug) -> tuple[Bug, ...]:
    """The injected bugs of a file, in its order, each an `of`. Errors: ValueError, with the file and the line."""
    bugs: list[Bug] = []
    entry: dict[str, str] = {}
    start = 0
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if not line or line == "##" or line.startswith("## "):
            continue
        if line.startswith("#"):
            if entry:
                bugs.append(_bug(entry, path, start, of))
            entry, start = _begun(line, path, number), number
        elif not entry:
            raise ValueError(f"{path}:{number}: {line!r} belongs to no entry; one begins '# name [kind] expect'")
        else:
            _add(entry, line, path, number)
    if entry:
        bugs.append(_bug(entry, path, start, of))
    return tuple(bugs)


def _begun(line: str, path: Path, number: int) -> dict[str, str]:
    header = HEADER.fullmatch(line)
    if header is None:
        raise ValueError(f"{path}:{number}: {line!r} is not '# name [kind] expect'; a comment begins with '## '")
    entry = header.groupdict()
    if entry["expect"].endswith(":"):
        entry["expect"] += " "  # an oracle without words
    return entry


def _add(entry: dict[str, str], line: str, path: Path, number: int) -> None:
    found = LINE.fullmatch(line)
    if found is None or not (found["sign"] or found["field"] in FIELDS):
        known = ", ".join(FIELDS)
        raise ValueError(f"{path}:{number}: {line!r} does not begin with one of {known}, '- ' or '+ '")
    name = TEXTS[found["sign"]] if found["sign"] else FIELDS[found["field"]]
    value = (found["code"] if found["sign"] else found["value"]) or ""
    if found["sign"] and name in entry:
        value = f"{entry[name]}\n{value}"
    elif name in entry:
        raise ValueError(f"{path}:{number}: {entry['name']!r} has a second {found['field']!r}")
    if "new" in entry and name != "new":
        raise ValueError(f"{path}:{number}: {line!r} stands after the new text of {entry['name']!r}")
    entry[name] = value


def _bug(entry: dict[str, str], path: Path, number: int, of: type[Bug]) -> Bug:
    for name, sign in (("at", "@@"), ("old", "-")):
        if not entry.get(name):
            raise ValueError(f"{path}:{number}: {entry['name']!r} has no line {sign!r}")
    try:
        return of(**{"new": "", **entry})
    except ValueError as error:
        raise ValueError(f"{path}:{number}: {error}") from None
