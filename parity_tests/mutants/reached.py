"""Which lines of production each scheme and each file of tests runs; remembered while nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_tests.harness.declare import discover
from parity_tests.injected_bugs.injected_bug import PRODUCTION, ROOT
from parity_tests.injected_bugs.runner import NOT_TRIED
from parity_tests.injected_bugs.trials import TRACED as TRACED
from parity_tests.injected_bugs.trials import SchemeTrials
from parity_tests.mutants.mutant import Mutant

Lines = dict[str, list[int]]  # of each file, relative to the root
TIMEOUT_S = 600.0  # for one file of tests
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=quick")


@dataclass(frozen=True)
class Reach:
    """What runs which lines, how long it took, and whether it passed: a file of tests that fails tells nothing."""

    lines: Lines
    seconds: float
    passed: bool = True

    def reaches(self, mutant: Mutant) -> bool:
        lines = self.lines.get(mutant.file, ())
        return any(mutant.first_line <= line <= mutant.last_line for line in lines)


class Memory:
    """Reaches by name in a JSON file, each as long as the text that it was found of is the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def of(self, name: str, text: str, find: Callable[[], Reach]) -> Reach:
        """The remembered reach, or the one that is found now."""
        stamp = hashlib.sha256(f"{_production()}\0{text}".encode()).hexdigest()[:16]
        record = self._records.get(name)
        if record is None or record["stamp"] != stamp:
            reach = find()
            record = {"stamp": stamp, "lines": reach.lines, "seconds": reach.seconds, "passed": reach.passed}
            self._records[name] = record
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self._records))
        return Reach(record["lines"], record["seconds"], record["passed"])


def of_schemes(memory: Memory, examples: int, progress: Callable[[str], Any]) -> dict[str, Reach]:
    """Every built-in scheme by its key."""
    reaches = {}
    for scheme in discover.built_in():
        if scheme.name not in NOT_TRIED:
            find = _finder_of_scheme(scheme, examples, progress)
            reaches[scheme.key] = memory.of(scheme.key, Path(scheme.file).read_text(), find)
    return reaches


def _finder_of_scheme(scheme: Any, examples: int, progress: Callable[[str], Any]) -> Callable[[], Reach]:
    def find() -> Reach:
        progress(f"lines of {scheme.name}")
        start = time.monotonic()
        trials = SchemeTrials(scheme, examples)
        trials.trace()
        return Reach(_by_file(trials.lines), time.monotonic() - start)

    return find


def _by_file(places: frozenset[tuple[str, int]]) -> Lines:
    lines: Lines = {}
    for file, line in sorted(places):
        lines.setdefault(file, []).append(line)
    return lines


def test_files(component: str) -> list[Path]:
    """Files of tests, those of the component first; the harness and the tools judge nothing of production."""
    folders = [folder for folder in sorted((ROOT / "parity_tests").iterdir()) if folder.is_dir()]
    folders = [folder for folder in folders if folder.name not in discover.NOT_COMPONENTS]
    folders.sort(key=lambda folder: folder.name != component)
    return [file for folder in folders for file in sorted(folder.glob("test_*.py"))]


def of_tests(memory: Memory, file: Path, progress: Callable[[str], Any]) -> Reach:
    """One file of tests, run in a process of its own with every line of production traced."""
    name = file.relative_to(ROOT).as_posix()

    def find() -> Reach:
        progress(f"lines of {name}")
        out = memory.path.with_name(f"lines_of_{file.stem}.json").resolve()
        out.unlink(missing_ok=True)
        start = time.monotonic()
        env = os.environ | {"LINES_TO": str(out), "LINES_OF": str(ROOT / PRODUCTION)}
        command = [sys.executable, *PYTEST, "-p", "parity_tests.mutants.lines_plugin", str(file)]
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Reach({}, TIMEOUT_S, passed=False)
        lines = json.loads(out.read_text()) if out.is_file() else {}
        out.unlink(missing_ok=True)
        return Reach(lines, time.monotonic() - start, passed=done.returncode == 0)

    return memory.of(name, file.read_text(), find)


def _production() -> str:
    """A stamp of production's text."""
    files = sorted((ROOT / PRODUCTION).rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
