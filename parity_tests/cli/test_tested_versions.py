"""Failing reports and --version name each package that is newer than the version this release was tested with."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from parity_tests.specimens.small_scheme import declared
from shardproof.cli.help import versions
from shardproof.report import tested_versions
from shardproof.report.tested_versions import TESTED

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
TORCH, JAX = (version(name).partition("+")[0] for name in ("torch", "jax"))
SENTENCES = [
    f"torch {TORCH} is newer than 2.10.0, with which this release was tested",
    f"jax {JAX} is newer than 0.9, with which this release was tested",
]


@pytest.fixture
def older_release(monkeypatch):
    """A release that was tested with an older torch and an older jax, and with packages that are not newer here."""
    tested = {
        "torch": "2.10.0",
        "jax": "0.9",
        "transformers": "99.0",
        "numpy": version("numpy"),
        "no-such-package": "1",
    }
    monkeypatch.setattr(tested_versions, "TESTED", tested)


def test_tested_versions_match_the_constraints():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))
    assert {name: pinned[name] for name in TESTED} == TESTED


def test_newer_packages_are_named(older_release):
    assert tested_versions.newer() == SENTENCES


@pytest.mark.parametrize(
    ("installed", "is_newer"),
    [("2.14.1", True), ("2.13.1", True), ("2.14.0.dev20261128+cu130", True), ("2.13.0+cpu", False), ("2.9.1", False)],
)
def test_numbers_are_compared(monkeypatch, installed, is_newer):
    monkeypatch.setattr(tested_versions, "TESTED", {"torch": "2.13.0"})
    monkeypatch.setattr(tested_versions, "installed_release", lambda name: installed)
    assert bool(tested_versions.newer()) == is_newer


def test_version_names_newer_packages(older_release):
    first, *rest = versions().splitlines()
    assert first.startswith("shardproof ") and rest == SENTENCES


def test_a_failing_report_begins_with_newer_packages(older_release):
    report = declared(lambda mesh, x: x * 3.0).verify(tp=2, examples=1)
    assert str(report).splitlines()[:2] == SENTENCES


def test_a_passing_report_names_no_newer_package(older_release):
    report = declared(lambda mesh, x: x * 2.0).verify(tp=2, examples=1)
    assert report.ok and "newer" not in str(report)
