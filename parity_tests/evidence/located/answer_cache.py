"""Answers about bugs in a file, one JSON record a line, so that a long run continues where it was interrupted."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug, patched_text


class AnswerCache:
    """`path` may be None, and need not exist. An answer holds for the text of the bug's file as it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self._answers = {record["key"]: record["answer"] for record in map(json.loads, lines)}

    def answer(self, bug: InjectedBug, dtype: str) -> dict[str, Any] | None:
        """The answer about a bug, None if nothing. Errors: StaleBug."""
        return self._answers.get(_key(bug, dtype))

    def keep(self, bug: InjectedBug, dtype: str, answer: dict[str, Any]) -> None:
        """Append an answer."""
        self._answers[_key(bug, dtype)] = answer
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": _key(bug, dtype), "name": bug.name, "answer": answer}) + "\n")


def _key(bug: InjectedBug, dtype: str) -> str:
    patched = patched_text(bug)
    return sha256(f"{dtype} {patched.file} {patched.text}".encode()).hexdigest()
