"""Records by key in a JSON Lines file: a recorded job is not done again, so a run may be stopped at any time."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any


class Journal:
    """Records of any thread, each with its `key`. Without a path they are kept for this run alone.

    Errors: SystemExit where a line of the file is no record, with its number and the remedy.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self._lock = path, threading.Lock()
        self.records: dict[str, dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path and path.is_file() else []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                self._amend(record)
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f"{path}:{number} is no record; remove this line, or the file to begin anew") from None

    def of(self, key: str) -> dict[str, Any]:
        """The record of a key, empty if there is none."""
        return self.records.get(key, {})

    def add(self, record: dict[str, Any]) -> None:
        """Append a line, which amends those before it of the same key."""
        line = json.dumps(record) + "\n"
        with self._lock:
            self._amend(record)
            if self.path:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(line)

    def _amend(self, record: dict[str, Any]) -> None:
        self.records[record["key"]] = self.of(record["key"]) | record
