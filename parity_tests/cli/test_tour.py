"""The tour exits with status 0 only if everything is right."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from shardproof.cli import tour, wrong_schemes
from shardproof.declare import discover
from shardproof.places import TESTS

LOGPROB = TESTS / "vocab_parallel" / "test_logprob.py"
STATISTICS = LOGPROB.with_name("test_statistics.py")


def reader():
    """The scheme that reads the text: enough for a quick tour."""
    return next(scheme for scheme in discover.schemes_of_file(str(LOGPROB)) if scheme.name == tour.READER)


@pytest.fixture
def one_scheme(monkeypatch):
    monkeypatch.setattr(discover, "built_in", lambda: [reader()])


@pytest.mark.slow
def test_all_is_well(one_scheme, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    assert tour.run(str(figure), examples=2) == 0
    printed = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert printed.count("\ncaught: ") == len(wrong_schemes.WRONG_SCHEMES) == 3
    assert all(bug.expect in printed for bug in wrong_schemes.WRONG_SCHEMES)
    assert "The one scheme means what its reference means" in printed


@pytest.mark.slow
def test_schemes_of_parts_that_are_not_public_are_verified_with_all(monkeypatch, tmp_path, capsys):
    other = next(each for each in discover.schemes_of_file(str(STATISTICS)) if each.name == "merged_statistics")
    monkeypatch.setattr(discover, "built_in", lambda: [reader(), other])
    for everything, closing in ((False, "The one scheme means"), (True, "All 2 schemes mean")):
        assert tour.run(str(tmp_path / "figure.png"), examples=1, everything=everything) == 0
        printed = capsys.readouterr().out
        assert closing in printed
        assert ("1 scheme of parts that are not public: shardproof tour --all" in printed) is not everything


@pytest.mark.slow
def test_the_tables_fit_a_terminal_of_80_columns(one_scheme):
    """Each row is one line, no heading is broken."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    tour.judged(console, 1)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    head = next(line.split() for line in lines if line.lstrip().startswith("tp "))
    assert head == ["tp", "perplexity", "reference", "float64", "ratio", "float32", "ratio", "verdict"]
    assert sum(line.split()[-1:] == ["equal"] for line in lines) == len(tour.READERS_TP)
    assert any(line.startswith("verdict ") for line in lines)


@pytest.mark.slow
def test_a_bug_that_is_not_named_is_not_caught(one_scheme, tmp_path, capsys, monkeypatch):
    first, *rest = wrong_schemes.WRONG_SCHEMES
    monkeypatch.setattr(wrong_schemes, "WRONG_SCHEMES", (replace(first, expect="something else"), *rest))
    assert tour.run(str(tmp_path / "figure.png"), examples=1) == 1
    assert f"NOT CAUGHT: {first.mistake}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_scheme_that_is_wrong_is_not_passed_over(tmp_path, capsys, monkeypatch):
    wrong = wrong_schemes.projection_without_backward_sum
    monkeypatch.setattr(discover, "built_in", lambda: [reader(), wrong])
    monkeypatch.chdir(tmp_path)  # a failing scheme leaves a replay file
    assert tour.run(str(tmp_path / "figure.png"), examples=1, everything=True) == 1
    assert f"{wrong.name} is not equal (mismatch)" in capsys.readouterr().out.replace("\n", " ")


def test_no_scheme_at_all_is_no_success(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(discover, "built_in", lambda: [])
    assert tour.run(str(tmp_path / "figure.png"), examples=1) != 0
    assert "Not all is as it should be" in capsys.readouterr().out
