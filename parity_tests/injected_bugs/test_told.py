"""What the killing run says while it works, also where nobody sees a terminal, and what it keeps to itself."""

import io

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from parity_tests.harness.declare import discover
from parity_tests.injected_bugs import __main__ as command
from parity_tests.injected_bugs.told import Told

SCHEMES = ("tied_hybrid_in_stages", "chunked_distributed_entropy")  # the first draws fewer micro-batches than stages


def said(console, **given):
    told = Told(console, **given)
    for number in range(1, 6):
        told("fault", number, 5, f"name {number}")
    return console.file.getvalue()


def test_elsewhere_than_on_a_terminal_lines_stay():
    assert said(Console(file=io.StringIO())).splitlines() == ["fault 1/5 name 1", "fault 5/5 name 5"]
    every = said(Console(file=io.StringIO()), every_s=0.0).splitlines()
    assert every == [f"fault {number}/5 name {number}" for number in range(1, 6)]


def test_on_a_terminal_a_line_is_overwritten():
    text = said(Console(file=io.StringIO(), force_terminal=True, width=40))
    assert "\n" not in text and text.count("\r") == 5


@pytest.fixture
def called(monkeypatch):
    schemes = [made for made in discover.built_in() if made.name in SCHEMES]
    monkeypatch.setattr(discover, "built_in", lambda: schemes)
    app = typer.Typer()
    app.command(epilog=command.EPILOG)(command.main)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_it_says_how_far_it_has_come_and_no_warning_of_a_schedule(called, caplog, tmp_path):
    found = called("local depth not divided by its sum", "--examples", "6", "--jax-cache", str(tmp_path))
    assert found.exit_code == 0, found.output
    lines = found.stderr.splitlines()
    assert [line.partition(" of scheme ")[2][:3] for line in lines[:2]] == ["1/2", "2/2"]
    assert lines[2:] == ["fault 1/1 local depth not divided by its sum"]
    assert [record.message for record in caplog.records if "micro-batches are fewer" in record.message] == []


def test_its_help_has_examples_and_statuses(called):
    text = called("--help").output
    assert "Examples:" in text and "python -m parity_tests.injected_bugs" in text and "Exit status:" in text
    assert called("no fault is called so").exit_code == 2
