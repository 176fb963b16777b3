"""Which lines of production each drawn case and each test runs; remembered while nothing changes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_tests.evidence.injected_bugs.injected_bug import PRODUCTION, ROOT
from parity_tests.evidence.injected_bugs.runner import NOT_TRIED
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants import pytest_process
from parity_tests.evidence.mutants.case_lines import masks_of
from parity_tests.evidence.mutants.lines_plugin import COLLECTED, WIDE
from parity_tests.evidence.workers import Workers
from shardproof.declare import discover
from shardproof.places import component_folders

Lines = dict[str, list[int]]  # of each file, relative to the root
Progress = Callable[[str], Any]
TOGETHER = 6  # files of tests that share a process and its imports
SCHEMES_TOGETHER = 16
TIMEOUT_S = 600.0  # for one file of tests, or for the schemes of a process
PLUGIN = ("-p", "parity_tests.evidence.mutants.lines_plugin")


@dataclass(frozen=True)
class CaseReach:
    """Which of a scheme's drawn cases run which lines: bit n of the number of a line, if case n does."""

    masks: Mapping[str, Mapping[str, int]]

    @property
    def width(self) -> int:
        """How many lines it runs."""
        return sum(map(len, self.masks.values()))

    def cases(self, file: str, numbers: Collection[int]) -> list[int]:
        """The cases that run one of these lines of a file."""
        mask, of_file = 0, self.masks.get(file, {})
        for line in numbers:
            mask |= of_file.get(str(line), 0)
        return [number for number in range(mask.bit_length()) if mask >> number & 1]


@dataclass(frozen=True)
class TestReach:
    """A test by its node id, which passes without a mutant; `collected` are the lines that collecting its file runs."""

    lines: Lines
    seconds: float
    name: str
    collected: Lines
    slow: bool = False  # left out of `make test`

    __test__ = False  # pytest collects no class of this name

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    def runs(self, file: str, numbers: Collection[int]) -> bool:
        """Whether it runs one of these lines of a file."""
        return any(line in numbers for line in self.lines.get(file, ()))

    @property
    def component(self) -> str:
        return self.file.split("/")[1]


class Memory:
    """Findings by name in a journal, each valid as long as its own text and the production files that it runs are.

    `found` of a scheme are lines by file of production; a file that is none of them cannot make it run another one.
    """

    def __init__(self, path: Path) -> None:
        self._journal, self._production = Journal(path), _production()

    def get(self, name: str, text: str) -> Any:
        """The finding, or None if there is none or it is out of date."""
        record = self._journal.of(name)
        if record.get("stamp") != _stamp(text):
            return None
        is_as_before = all(self._production.get(file) == stamp for file, stamp in record["files"].items())
        return record["found"] if is_as_before else None

    def put(self, name: str, text: str, found: Any, files: Iterable[str]) -> None:
        """Remember the finding for a text, and the files of production that it runs."""
        stamps = {file: self._production[file] for file in files}
        self._journal.add({"key": name, "stamp": _stamp(text), "files": stamps, "found": found})


def of_schemes(memory: Memory, examples: int, workers: Workers, progress: Progress) -> dict[str, CaseReach]:
    """Every built-in scheme by its key."""
    texts = {
        scheme.key: f"{examples}\0{Path(scheme.file).read_text()}"
        for scheme in discover.built_in()
        if scheme.name not in NOT_TRIED
    }

    def find(keys: Sequence[str]) -> None:
        progress(f"lines of {', '.join(key.rpartition(':')[2] for key in keys)}")
        for key, masks in workers.call(masks_of, keys, examples, limit_s=TIMEOUT_S).items():
            memory.put(key, texts[key], masks, masks)

    missing = [key for key, text in texts.items() if memory.get(key, text) is None]
    workers.each(find, [missing[i : i + SCHEMES_TOGETHER] for i in range(0, len(missing), SCHEMES_TOGETHER)])
    return {key: CaseReach(memory.get(key, text)) for key, text in texts.items()}


def test_files(component: str) -> list[Path]:
    """Files of tests, the component's own first; tests of the harness and the tools judge nothing of production."""
    folders = sorted(component_folders(), key=lambda folder: folder.name != component)
    return [file for folder in folders for file in sorted(folder.glob("test_*.py"))]


test_files.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]


def of_tests(memory: Memory, files: Iterable[Path], workers: Workers, progress: Progress) -> list[TestReach]:
    """The tests of these files that pass, run in processes of some files with every line of production traced."""
    texts = {file: file.read_text() for file in files}

    def find(together: Sequence[Path]) -> None:
        progress(f"lines of {', '.join(_name(file) for file in together)}")
        found = _traced(together, workers)
        if found is None and len(together) > 1:  # one of them did not end, or ended the process
            for file in together:
                find([file])
        elif not workers.stopped.is_set():
            for file in together:
                of_file = _of_file(found or {}, _name(file))
                memory.put(_name(file), texts[file], of_file, _files_of(of_file))

    missing = [file for file, text in texts.items() if memory.get(_name(file), text) is None]
    workers.each(find, [missing[i : i + TOGETHER] for i in range(0, len(missing), TOGETHER)])
    found = [memory.get(_name(file), text) for file, text in texts.items()]
    return [TestReach(**test, collected=each["collected"]) for each in found for test in each["tests"]]


def _traced(files: Sequence[Path], workers: Workers) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.json"
        environment = {"LINES_TO": str(out), "LINES_OF": str(ROOT / PRODUCTION), "COVERAGE_CORE": "ctrace"}
        limit = TIMEOUT_S * len(files)
        pytest_process.status(ROOT, [*PLUGIN, *map(_name, files)], environment, limit, workers)
        return json.loads(out.read_text()) if out.is_file() else None


def _of_file(found: dict[str, Any], file: str) -> dict[str, Any]:
    """The passing tests of a file; one that starts processes reaches all that the file's tests and imports name."""
    if not found:
        return {"tests": [], "collected": {}}
    lines, wide = found["lines"], found["lines"].get(WIDE + file, {})
    of_file = {name: test for name, test in found["tests"].items() if name.partition("::")[0] == file}
    all_of_file = _united([found["imported"].get(file, {}), *(lines.get(name, {}) for name in of_file)])
    tests = [
        {
            "name": name,
            "seconds": round(test["seconds"], 2),
            "slow": test["slow"],
            "lines": _united([wide, all_of_file if test["starts"] else lines.get(name, {})]),
        }
        for name, test in of_file.items()
        if test["passed"]
    ]
    return {"tests": tests, "collected": lines.get(COLLECTED + file, {})}


def _files_of(found: dict[str, Any]) -> set[str]:
    """The files of production that a file of tests runs."""
    return {file for lines in (found["collected"], *(test["lines"] for test in found["tests"])) for file in lines}


def _united(many: Iterable[Lines]) -> Lines:
    united: dict[str, set[int]] = {}
    for lines in many:
        for file, numbers in lines.items():
            united.setdefault(file, set()).update(numbers)
    return {file: sorted(numbers) for file, numbers in united.items()}


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _production() -> dict[str, str]:
    """A stamp of each file of production."""
    return {_name(file): _stamp(file.read_text()) for file in (ROOT / PRODUCTION).rglob("*.py")}


def _stamp(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
