"""The command's output while it runs, on a terminal and elsewhere, and which warnings it suppresses."""

import io
import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from parity_tests import warm_python
from parity_tests.evidence.injected_bugs import __main__ as command
from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.report import Progress
from shardproof.declare import discover

SCHEMES = ("tied_hybrid_in_stages", "chunked_distributed_entropy")  # the first draws fewer micro-batches than stages


def printed(console, **options):
    progress = Progress(console, **options)
    for number in range(1, 6):
        progress("bug", number, 5, f"name {number}")
    return console.file.getvalue()


def test_elsewhere_than_on_a_terminal_lines_stay():
    assert printed(Console(file=io.StringIO())).splitlines() == ["bug 1/5 name 1", "bug 5/5 name 5"]
    every = printed(Console(file=io.StringIO()), every_s=0.0).splitlines()
    assert every == [f"bug {number}/5 name {number}" for number in range(1, 6)]


def test_on_a_terminal_a_line_is_overwritten():
    text = printed(Console(file=io.StringIO(), force_terminal=True, width=40))
    assert "\n" not in text and text.count("\r") == 5


@pytest.fixture
def command_line(monkeypatch, tmp_path):
    """The command, of few schemes; their index is no other process's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "index"))
    schemes = [scheme for scheme in discover.built_in() if scheme.name in SCHEMES]
    monkeypatch.setattr(discover, "built_in", lambda: schemes)
    app = typer.Typer()
    app.command(epilog=command.EPILOG)(command.main)
    return lambda *arguments: CliRunner().invoke(app, arguments)


@pytest.mark.slow
def test_it_prints_progress_and_no_warning_of_a_schedule(command_line, caplog, tmp_path):
    result = command_line("local mean not divided by its sum", "--examples", "20", "--jax-cache", str(tmp_path))
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert [line.partition(" of scheme ")[2][:3] for line in lines[:2]] == ["1/2", "2/2"]
    assert lines[2:] == ["bug 1/1 local mean not divided by its sum"]
    assert [record.message for record in caplog.records if "micro-batches are fewer" in record.message] == []


@pytest.mark.slow
def test_two_processes_share_the_bugs_and_their_outcomes_keep_the_order(tmp_path):
    outcomes = tmp_path / "outcomes.json"
    arguments = ["largest term", "--jobs", "2", "--scheme", "vocab_parallel_logprob", "--examples", "1"]
    command_of = ("-m", "parity_tests.evidence.injected_bugs", *arguments, "--json", str(outcomes))
    completed = warm_python.run(*command_of, folder=tmp_path)
    assert completed.stderr.count("lines of scheme 1/1 vocab_parallel_logprob") == 2, completed.stderr
    examples = {outcome["bug"]: outcome["examples"] for outcome in json.loads(outcomes.read_text())["bugs"]}
    assert list(examples) == [bug.name for bug in CATALOGUE if "largest term" in bug.name]
    assert examples["local sum counts its largest term"] == "1"


def test_its_help_has_examples_and_statuses(command_line):
    text = command_line("--help").output
    assert "Examples:" in text and "python -m parity_tests.evidence.injected_bugs" in text and "Exit status:" in text
    assert command_line("no bug has this name").exit_code == 2
    assert command_line("largest term", "--scheme", "no scheme has this name").exit_code == 2
