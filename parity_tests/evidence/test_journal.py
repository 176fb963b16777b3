"""A journal: the next run reads the records that were added, and a damaged line is rejected."""

import pytest

from parity_tests.evidence.journal import Journal


def test_records_amend_those_before_them(tmp_path):
    path = tmp_path / "build" / "journal.jsonl"
    first = Journal(path)
    for record in ({"key": "a", "drawn": 1}, {"key": "b"}, {"key": "a", "tests": 2}):
        first.add(record)
    again = Journal(path)
    assert again.records == first.records == {"a": {"key": "a", "drawn": 1, "tests": 2}, "b": {"key": "b"}}
    assert again.of("c") == {} and len(path.read_text().splitlines()) == 3


def test_without_a_path_nothing_is_written():
    journal = Journal(None)
    journal.add({"key": "a"})
    assert journal.of("a") == {"key": "a"}


@pytest.mark.parametrize("line", ['{"key": "x"', "3", "[]", "null", '{"name": "x"}', '{"key": []}', ""])
def test_a_damaged_line_is_rejected(line, tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text(f'{{"key": "a"}}\n{line}\n')
    with pytest.raises(SystemExit, match=r"journal.jsonl:2 is no record; remove this line, or the file to begin anew"):
        Journal(path)
