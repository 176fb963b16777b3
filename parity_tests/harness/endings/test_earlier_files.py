"""Verdicts of an earlier command: which words of a command line name a file that it writes."""

import json

import pytest

from shardproof.endings.earlier_files import mark


@pytest.mark.parametrize(
    "words", [[], ["tour"], ["verify", "x.py"], ["verify", "x.py", "--json"], ["list", "--json", "f"]]
)
def test_a_command_without_such_a_file_marks_none(words):
    assert mark(words) == []


@pytest.mark.parametrize("words", [["tour", "--json", "f.json"], ["verify", "x.py", "--json=f.json"]])
def test_an_earlier_verdict_is_marked(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.json").write_text('{"status": 0, "reports": []}')
    assert mark(words) == [str(tmp_path / "f.json")]
    assert json.loads((tmp_path / "f.json").read_text())["status"] != 0
