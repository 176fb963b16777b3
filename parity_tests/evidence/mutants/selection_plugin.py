"""A plugin of pytest that runs the tests of a list in its order, up to the first that fails: `-p` names it.

`TESTS_FROM` is a JSON file of node ids and time limits. To the file `TESTS_TO` goes a line for each test that begins,
or for the file that cannot be collected; the first failure ends the process at once, whatever its threads do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    if os.getsid(0) != os.getpid():
        os.setsid()  # processes that its tests start end with it


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    result = yield  # after conftest.py, which has an order of its own
    limits = dict(json.loads(Path(os.environ["TESTS_FROM"]).read_text()))
    order = {name: place for place, name in enumerate(limits)}
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    for item in items:
        item.add_marker(pytest.mark.timeout(limits[item.nodeid]), append=False)
    return result


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        os._exit(1)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(report.nodeid)
        os._exit(1)


def _note(name: str) -> None:
    with Path(os.environ["TESTS_TO"]).open("a") as file:
        file.write(f"{json.dumps(name)}\n")
