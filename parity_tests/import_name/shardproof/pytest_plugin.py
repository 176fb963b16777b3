"""The pytest plugin: a file's schemes are tests, and tracebacks end at the user's own lines.

pytest loads this wherever Shardproof is installed: it imports neither torch nor JAX before a scheme is collected.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import traceback
import unittest
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

FILES = ("scheme_*.py", "*_scheme.py")  # besides files named on the command line
DECORATOR = "@scheme"
_LOADED = "shardproof.report.report"  # defines verdicts: until a test has loaded it, no exception is a verdict
ENGINES = ("lockstep", "gloo", "nccl")
WHOLE_LINES = ("CI", "BUILD_NUMBER")  # pytest cuts no line of its summary where one of these is set
OF_PYTEST = (pytest.skip.Exception, pytest.xfail.Exception, pytest.exit.Exception, unittest.SkipTest)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardproof", "schemes, in files named scheme_*.py or *_scheme.py or given by name")
    group.addoption("--shardproof-engine", choices=ENGINES, default="lockstep", help="the engine that runs the schemes")
    group.addoption("--shardproof-examples", type=_positive, metavar="N", help="cases for each scheme; default: 20")


def pytest_configure(config: pytest.Config) -> None:
    # The built-in schemes have this mark, and a user's test may import them.
    config.addinivalue_line("markers", "cases(examples=None, **fixed): the cases that test a built-in scheme")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; give a number of cases of 1 or more")
    return int(text)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the schemes of a file named as in FILES, or of another file on the command line; never of a test file."""
    return SchemeFile.from_parent(parent, path=file_path) if _has_schemes(file_path, parent) else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect the test functions of a file with schemes, even if one of its declarations fails."""
    return ModuleOfSchemes.from_parent(parent, path=module_path) if _has_schemes(module_path, parent) else None


def _has_schemes(file: Path, parent: pytest.Collector) -> bool:
    if file.suffix != ".py":
        return False
    is_of_tests = any(file.match(pattern) for pattern in parent.config.getini("python_files"))
    is_named = parent.session.isinitpath(file) or any(file.match(pattern) for pattern in FILES)
    return not is_of_tests and is_named and _mentions_schemes(file)


def _mentions_schemes(file: Path) -> bool:
    """Whether a file may declare schemes, in any spelling: `@scheme`, `@shardproof.scheme`, `@sp.scheme`, a call."""
    text = _text(file)
    return DECORATOR in text or "shardproof" in text


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


class ModuleOfSchemes(pytest.Module):
    """The module of a file with schemes; `SchemeFile` reports the schemes whose declaration failed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        from shardproof.declare.failed_declaration import collected
        from shardproof.endings import exits

        try:
            with collected(self.path.stem), exits.raised():
                return list(super().collect())
        except SystemExit as left:  # pytest would end, and lose every other test
            raise self.CollectError(f"{self.path.name}: it exits when it is imported: {left}") from None


class SchemeFile(pytest.File):
    """A file that declares schemes."""

    def collect(self) -> Iterator[SchemeTest]:
        from shardproof.declare.discover import NoScheme, UnusableTarget, declarations_of_file

        try:
            schemes = declarations_of_file(str(self.path))
        except UnusableTarget as reason:
            if isinstance(reason, NoScheme) and DECORATOR not in self.path.read_text(
                encoding="utf-8", errors="replace"
            ):
                return  # it only uses the package
            raise self.CollectError(str(reason)) from None
        for scheme in schemes:
            yield SchemeTest.from_parent(self, name=scheme.name, scheme=scheme)


class SchemeTest(pytest.Item):
    """A scheme as a test: it passes if all drawn cases are equal."""

    def __init__(self, *, scheme: Any, **of_item: Any) -> None:
        super().__init__(**of_item)
        self.scheme, self.report = scheme, None

    def runtest(self) -> None:
        from shardproof import NotRun, verify
        from shardproof.declare.declaration_failure import DeclarationFailure
        from shardproof.declare.failed_declaration import FailedDeclaration, FailedImport

        if isinstance(self.scheme, FailedDeclaration | FailedImport):
            raise DeclarationFailure(self.scheme.sentence)
        engine, examples = self.config.option.shardproof_engine, self.config.option.shardproof_examples
        if engine not in self.scheme.engines:
            pytest.skip(f"is declared for {', '.join(self.scheme.engines)} only")
        try:
            self.report = verify(self.scheme, engine, examples)
        except NotRun as reason:
            pytest.skip(f"not run: {reason}")
        except OF_PYTEST as outcome:  # a scheme is a test of its own, which none of its functions may skip or end
            from shardproof.report.guard import sentence_of

            raise DeclarationFailure(f"scheme '{self.name}': {sentence_of(outcome)[1]}") from None
        self.report.raise_if_failed()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report without a traceback: no line of the test is to blame for a scheme."""
        from shardproof.compared import NothingCompared
        from shardproof.declare.declaration_failure import DeclarationFailure
        from shardproof.engines.failure import RankFailure
        from shardproof.judge.reference import ReferenceFailure
        from shardproof.report.pytest_lines import Crash, of_scheme
        from shardproof.report.report import VerdictError

        if isinstance(
            excinfo.value, VerdictError | RankFailure | ReferenceFailure | DeclarationFailure | NothingCompared
        ):
            return of_scheme(excinfo, self.report, Crash(str(self.path), self.scheme.line, ""))
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.scheme.line - 1, self.name


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """If tests failed, keep that exit status: an `atexit` function of a scheme's file cannot replace it."""
    if exitstatus and _LOADED in sys.modules:
        from shardproof.endings import exits

        atexit.register(exits.install_alone)  # runs before the functions that are registered by now


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Print a verdict as a report, and hide the harness's frames in a test's exception unless --full-trace is given."""
    raised = error = None if call.excinfo is None else call.excinfo.value
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        _hide_frames(error)
        error = error.__cause__ or error.__context__
    report = yield
    report.of_shardproof = isinstance(item, SchemeTest)
    is_traceback = not report.of_shardproof and hasattr(report.longrepr, "reprtraceback")
    if raised is not None and is_traceback and _LOADED in sys.modules:
        from shardproof.report.pytest_lines import of_test

        report.of_shardproof = of_test(raised, report.longrepr)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Cut the messages of verdicts in a coloured summary, where pytest does not count the width of a coloured name."""
    writer = config.get_terminal_writer()
    is_whole = config.option.verbose >= 2 or any(os.environ.get(name) for name in WHOLE_LINES)
    if not writer.hasmarkup or (is_whole and not config.getoption("force_short_summary", False)):
        return
    for report in terminalreporter.getreports("failed"):
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and getattr(report, "of_shardproof", False):
            room = writer.fullwidth - len(f"FAILED {report.nodeid} - ")
            if len(crash.message) > room:
                crash.message = f"{crash.message[: max(room - 3, 0)]}..."


def _hide_frames(error: BaseException) -> None:
    """Hide the frames of the harness, and the frames of decorators around its functions."""
    ours = f"{Path(__file__).parent}/"
    decorator = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(ours):
            frame.f_globals.setdefault("__tracebackhide__", True)
            if decorator is not None:
                decorator.f_locals["__tracebackhide__"] = True
        decorator = frame if frame.f_code.co_filename == contextlib.__file__ else None
