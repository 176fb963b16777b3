"""Set-up for every test: Hypothesis profiles, a temporary folder, the command line's tests, pytest's header."""

import functools
import gc
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank
os.environ.pop("COLUMNS", None)  # readline sets it in the environment of workers, and pipes would break lines there
if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # a command that a shell starts with & ignores it, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

from parity_tests.slow import mark_other_values
from shardproof import verification
from shardproof.declare.declared import Declared
from shardproof.draw import profiles
from shardproof.draw.reproducible import make_draws_reproducible
from shardproof.engines.collector import collect_rarely, freeze_heap
from shardproof.engines.processes import pool
from shardproof.experiments import notes
from shardproof.pytest_plugin import pytest_configure as pytest_configure  # our own mark is known
from shardproof.report import tested_versions

collect_rarely()
gc.disable()  # until all tests are collected: imported modules stay
make_draws_reproducible()
profiles.register_profiles()
settings.load_profile("dev")  # --hypothesis-profile=ci overrides it


# A process that began one of these last would keep the other waiting: their few tests take half a minute and more.
LONG_FILES = (
    "evidence/injected_bugs/test_catalogue.py",
    "test_every_scheme.py",
    "kernels/test_devices.py",
    "test_import_name.py",
    "training/test_torchrun.py",
    "test_annotations.py",
    "vocab_parallel/test_logprob.py",
    "cli/test_tour.py",
    "training/test_killed.py",
    "test_worked_example.py",
    "expert_parallel/test_routed_experts.py",
    "harness/engines/processes/test_orphans.py",
    "pipelining/test_reference.py",
    "training/test_precision.py",
    "evidence/injected_bugs/test_command.py",
    "test_quickstart.py",
    "parallelizer/test_families.py",
    "harness/test_second_opinion.py",
    "mamba/test_mamba_ssm_kernels.py",
    "parallelizer/test_expert_sharding.py",
    "cli/test_page_commands.py",
    "evidence/benchmarks/test_dispatch.py",
    "harness/engines/processes/test_launch.py",
    "harness/judge/test_every_reference.py",
)


def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: Any) -> list[pytest.Item] | None:
    """One test for each `@pytest.mark.cases` below a `@scheme`; it passes its arguments to `check_cases`."""
    if isinstance(obj, pytest.MarkDecorator) and obj.name == "cases":
        raise collector.CollectError(f"{name}: @pytest.mark.cases stands above @scheme; move it below")
    if not isinstance(obj, Declared) or obj.fn.__module__ != collector.obj.__name__:  # the latter was imported
        return None
    marks = [mark for mark in getattr(obj.fn, "pytestmark", ()) if mark.name == "cases"]
    return [SchemeTest.of(collector, obj, mark) for mark in marks]


class SchemeTest(pytest.Function):
    """Drawn cases of a scheme as a test, named `file::scheme` or `file::scheme[engine=gloo]`."""

    scheme: Declared

    @classmethod
    def of(cls, module: pytest.Module, scheme: Declared, mark: pytest.Mark) -> pytest.Item:
        fixed = "-".join(f"{name}={value}" for name, value in mark.kwargs.items())
        body = functools.partial(verification.check_cases, scheme, *mark.args, **mark.kwargs)
        test = cls.from_parent(module, name=f"{scheme.name}[{fixed}]" if fixed else scheme.name, callobj=body)
        test.scheme = scheme
        test.own_markers += scheme.fn.pytestmark  # with other marks of the function
        return test

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.scheme.line - 1, self.name


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark slow values before tests are selected by marks; then sort so that parallel processes end together."""
    mark_other_values(items)
    yield
    put_long_files_first(items)


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Long files first, then files of most tests, so that processes that share the files end together.

    Experiments come before all: they fork the process and search its heap, which the other tests fill.
    """
    counts = Counter(item.path for item in items)
    folder = Path(__file__).parent
    assert all((folder / name).is_file() for name in LONG_FILES)

    def order(item: pytest.Item) -> tuple[int, int, str]:
        name = item.path.relative_to(folder).as_posix() if item.path.is_relative_to(folder) else ""
        is_early = name.startswith("harness/experiments/")
        place = -1 if is_early else LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)
        return place, -counts[item.path], name

    items.sort(key=order)  # stable: the order within a file stays


def pytest_collection_finish() -> None:
    """Collected items live to the end, so keep Python's garbage collector from searching them again."""
    freeze_heap()
    gc.enable()


@pytest.fixture(scope="session")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new folder for each test. Numbered here: pytest would list the thousands that there are to find a number."""
    folder = tmp_path_factory.mktemp("cases")
    return (folder / f"case{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, own_folders: Iterator[Path]) -> None:
    """Each test runs in an empty folder, where the replay files of failing cases may lie."""
    folder = next(own_folders)
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture(autouse=True)
def nothing_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports read alike on every torch; the line about newer versions has tests of its own."""
    monkeypatch.setattr(tested_versions, "TESTED", {})


@pytest.fixture
def unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` ends with the smallest failing case: no fresh processes confirm it, and no other cases explain it.

    For tests that check the case that is found, and its verdict.
    """
    monkeypatch.setattr(pool, "start_ahead", lambda: None)
    monkeypatch.setattr(verification, "second_opinion", lambda scheme, report, *_: report)
    monkeypatch.setattr(verification, "check_notes", lambda scheme, report: report)


@pytest.fixture
def without_line_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the search for an edited line, which takes seconds: for tests of earlier notes."""
    monkeypatch.setattr(notes, "name_edited_line", lambda scheme, report, failing, notes: notes)


@pytest.fixture
def shardproof(monkeypatch, capsys):
    """The command, run in this process: status, standard output, standard error."""
    from shardproof.cli.app import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardproof", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        output = capsys.readouterr()
        return left.value.code or 0, output.out, output.err

    return call


def pytest_report_header() -> str:
    return f"torch {version('torch')}, jax {version('jax')}, Hypothesis profile {profiles.profile()}"
