"""A plugin of pytest that writes which lines of a folder each test runs, in any thread: `-p` names it.

A test reaches the lines that run while it is set up, called and torn down. Fixtures wider than a function, and the
collection of a file, are recorded for the file. A test that starts processes, in which nothing is traced, reaches all
lines of the functions, classes and modules that its file imports from the folder; if it imports none, of its component.
Caches are emptied before each test, so that no test reads another one's results.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import coverage
import pytest

Lines = dict[str, set[int]]
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.sendmsg")
CACHES = ("torch_impl.", "parity_tests.", "shardproof.cost.", "shardproof.tracing.", "shardproof.training.")
COLLECTED, WIDE = "collected ", "wide "  # contexts of a file: its collection, and its wide fixtures


class Recorder:
    """Record the lines that the tests of a process reach; `to` is the file that they are written to at the end."""

    def __init__(self, folder: str, to: Path) -> None:
        self.folder, self.to = folder, to
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=[f"{folder}/*"])
        self._coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self._coverage.start()
        self._context, self._starts = "", False
        self._tests: dict[str, dict[str, Any]] = {}
        self._imported: dict[str, Lines] = {}
        sys.addaudithook(lambda event, _: self._note_process() if event in STARTS else None)
        send = Connection.send
        # Ranks that an earlier test has started are given their work so.
        Connection.send = lambda connection, value: (self._note_process(), send(connection, value))[1]  # type: ignore

    def _note_process(self) -> None:
        self._starts = True

    def _switch(self, context: str) -> str:
        before, self._context = self._context, context
        self._coverage.switch_context(context)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        if not isinstance(collector, pytest.Module):
            return (yield)
        before = self._switch(COLLECTED + collector.nodeid)
        try:
            return (yield)
        finally:
            self._switch(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(WIDE + request.node.nodeid.partition("::")[0])
        try:
            return (yield)
        finally:
            self._switch(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        empty_caches()
        self._starts, start = False, time.monotonic()
        is_slow = item.get_closest_marker("slow") is not None
        self._tests[item.nodeid] = {"passed": False, "starts": False, "slow": is_slow}
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch("")
            self._tests[item.nodeid] |= {"seconds": time.monotonic() - start, "starts": self._starts}
            file = item.nodeid.partition("::")[0]
            if self._starts and file not in self._imported:
                self._imported[file] = imported_lines(getattr(item, "module", None), self.folder, item.path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._tests[report.nodeid]["passed"] = report.passed
        elif report.failed:
            self._tests[report.nodeid]["passed"] = False

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        root, data = Path(self.folder).parent, self._coverage.get_data()
        by_context: dict[str, dict[str, list[int]]] = {}
        for file in sorted(data.measured_files()):
            name = Path(file).relative_to(root).as_posix()
            for line, contexts in sorted(data.contexts_by_lineno(file).items()):
                for context in contexts:
                    by_context.setdefault(context, {}).setdefault(name, []).append(line)
        imported = {
            file: {Path(path).relative_to(root).as_posix(): sorted(numbers) for path, numbers in lines.items()}
            for file, lines in self._imported.items()
        }
        self.to.write_text(json.dumps({"lines": by_context, "imported": imported, "tests": self._tests}))


def pytest_configure(config: pytest.Config) -> None:
    if os.getsid(0) != os.getpid():
        os.setsid()  # processes that its tests start end with it
    config.pluginmanager.register(Recorder(os.environ["LINES_OF"], Path(os.environ["LINES_TO"])))


def empty_caches() -> None:
    """Of production, and of tests that call it; the harness's hold references, which no mutant changes."""
    for name, module in list(sys.modules.items()):
        if name.startswith(CACHES):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def imported_lines(module: ModuleType | None, folder: str, file: Path) -> Lines:
    """All lines of the objects that a test file imports from the folder, or else of its component."""
    lines: Lines = {}
    for value in list(vars(module).values()) if module else ():
        try:
            path, (text, first) = inspect.getsourcefile(value) or "", inspect.getsourcelines(value)
        except (TypeError, OSError):
            continue
        if path.startswith(f"{folder}/"):
            lines.setdefault(path, set()).update(range(max(first, 1), max(first, 1) + len(text)))
    if not lines:
        for path in (Path(folder) / file.parent.name).rglob("*.py"):
            lines[str(path)] = set(range(1, 1 + len(path.read_text().splitlines())))
    return lines
