"""The journal of a command: a process that dies leaves its verdicts, and the next process reads them."""

import os
import tempfile

import pytest

from shardproof.endings.journal import Journal


@pytest.fixture
def journal():
    with tempfile.TemporaryFile() as file:
        record = Journal(file)
        record.start_child()
        yield record


def again(journal):
    """The journal as the next process reads it."""
    journal.start_child()
    journal.read()
    return journal


def test_a_key_is_begun_until_it_is_done_or_lost(journal):
    assert journal.begun is None
    journal.begin("outer")
    journal.begin("inner")
    assert journal.begun == "inner"
    journal.done("inner")
    assert journal.begun == "outer"
    journal.lose("outer", "it died")
    assert journal.begun is None


def test_a_scheme_begun_by_an_earlier_process_is_not_begun_again(journal):
    journal.begin("outer")
    assert again(journal).begun is None


def test_outcomes_reports_and_sentences_are_read_by_the_next_process(journal):
    for key in ("one", "two"):
        journal.begin(key)
        journal.found(key, f"report of {key}")
    journal.done("one", {"verdict": "equal"})
    journal.lose("two", "killed at \udc80.py:3")
    assert (journal.outcome("one"), journal.report("two"), journal.sentence("two")) == (None, None, None)
    again(journal)
    assert (journal.outcome("one"), journal.outcome("two")) == ({"verdict": "equal"}, None)
    assert (journal.report("two"), journal.sentence("one")) == ("report of two", None)
    assert journal.sentence("two") == "killed at \\udc80.py:3"


def test_an_outcome_that_cannot_be_pickled_is_judged_again(journal):
    journal.begin("one")
    journal.done("one", lambda: None)
    assert journal.begun is None
    assert again(journal).outcome("one") is None


@pytest.mark.parametrize("cut", [1, 5, 12, 30])
def test_a_record_that_was_cut_short_is_dropped(journal, cut):
    journal.begin("one")
    journal.done("one", "first")
    journal.begin("two")
    journal.done("two", "x" * 100)
    size = os.fstat(journal._fd).st_size
    os.ftruncate(journal._fd, size - cut)
    assert journal.begun == "two"
    again(journal)
    assert (journal.outcome("one"), journal.outcome("two")) == ("first", None)
    journal.begin("three")
    assert journal.begun == "three"


def test_a_full_disk_ends_the_journal_and_nothing_else(journal, monkeypatch):
    journal.begin("one")

    def full(fd, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        journal.done("one", "outcome")
    journal.begin("two")
    assert journal.begun == "one"


def test_a_file_that_a_users_code_has_closed_is_as_a_full_disk(journal):
    journal.begin("one")
    kept, number = os.dup(journal._fd), journal._fd
    os.close(number)
    journal.done("one", "outcome")
    os.dup2(kept, number)
    journal.begin("two")
    assert journal.begun == "one"
    os.close(kept)


def test_a_file_that_takes_the_number_of_a_closed_one_stays_as_it_is(journal, tmp_path):
    with open(tmp_path / "another", "w+b") as another:
        os.dup2(another.fileno(), journal._fd)
    journal.begin("one")
    assert (tmp_path / "another").read_bytes() == b""
