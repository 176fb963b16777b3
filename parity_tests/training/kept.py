"""Answers about faults in a file, one JSON record a line, so that a long run goes on where it was cut off."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from parity_tests.faults.fault import Fault
from parity_tests.faults.patch import patched_text


class Kept:
    """`path` may be None, and need not exist. An answer holds for the text of the fault's file as it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        there = path.read_text().splitlines() if path and path.exists() else []
        self._known = {record["key"]: record["answer"] for record in map(json.loads, there)}

    def answer(self, fault: Fault, dtype: str) -> dict[str, Any] | None:
        """What was kept of a fault, None if nothing. Errors: StaleFault."""
        return self._known.get(_key(fault, dtype))

    def keep(self, fault: Fault, dtype: str, answer: dict[str, Any]) -> None:
        """Append an answer."""
        self._known[_key(fault, dtype)] = answer
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": _key(fault, dtype), "name": fault.name, "answer": answer}) + "\n")


def _key(fault: Fault, dtype: str) -> str:
    return sha256(f"{dtype} {fault.file} {patched_text(fault)}".encode()).hexdigest()
