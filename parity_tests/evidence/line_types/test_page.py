"""What the page on types counts, and the sample of bugs."""

from parity_tests.evidence.line_types.page import Located, text
from shardproof.line_types import opinion


def located(sentence, caught):
    return Located("a bug", "collectives", "reduction", sentence, caught, "")


def test_a_bug_is_found_by_both_by_one_or_by_neither():
    clash, agree = "line 3: partial value over tp in relu", "types agree where they can be followed"
    assert [located(*each).word for each in [(clash, True), (clash, False), (agree, True), (agree, False)]] == [
        "both",
        "types",
        "values",
        "none",
    ]
    assert not located("could not type line 3: flip", True).by_types
    assert not located(f"{opinion.COULD_NOT}: its process ended without a word", True).by_types


def test_the_page_counts_alarms_and_what_was_found(monkeypatch):
    monkeypatch.setattr("parity_tests.evidence.line_types.page.written_by", lambda *args, **kwargs: "Written.")
    sentences = {
        "right": "types agree where they can be followed",
        "permuted": "not typed: cp (striped)",
        "unknown": "could not type line 3: flip",
        "wrongly": "output 'out' is tp=R, its spec says tp=I",
    }
    page = text(sentences, [located("line 3: partial value over tp in relu", True), located("not typed: cp", True)], 0)
    assert "1 clashes, each of which would be a false alarm." in page
    assert "1 agree where they can be followed, 1 stop at an operation" in page and "1 have no axis" in page
    assert "1 of 2 (50.0%) by both, 0 by types alone, 1 by the verdict alone, 0 by neither." in page
    assert "| a bug | collectives | line 3: partial value over tp in relu |" in page
