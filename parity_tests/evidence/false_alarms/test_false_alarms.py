"""The run that looks for false alarms: its cases repeat, a wrong scheme is one, and a stopped run goes on."""

from __future__ import annotations

import json
from collections import Counter

import jax.numpy as jnp
import pytest

from parity_tests.evidence.false_alarms import page, run
from parity_tests.evidence.false_alarms.run import EACH, Counts, counts_of, judge, schemes
from shardproof import scheme, values
from shardproof.declare import discover

SUM = "parity_tests.collectives.test_schemes:sum_to_invariant"
TERM = "parity_tests.collectives.test_schemes:sum_to_replicated"


def test_a_right_scheme_has_no_alarm_and_the_same_examples_again():
    first, second = (judge(discover.lookup(SUM), 3, 12) for _ in range(2))
    assert (first.examples.total(), first.alarms, first.undecided) == (12, [], [])
    assert (first.examples, first.conditions, first.worst) == (second.examples, second.conditions, second.worst)
    assert first.conditions and set(first.examples) == {"float32", "bfloat16"}


@pytest.mark.slow
def test_a_reported_error_is_an_alarm_with_its_case():
    doubled = scheme(reference=lambda x: 2.0 * x, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp")(
        lambda mesh, x: 2 * x + (x.shape[0] > 1)
    )
    counts = judge(doubled, 0, 40)
    assert counts.alarms and all("mismatch" in alarm and " budgets" in alarm for alarm in counts.alarms)
    assert f"{len(counts.alarms)} false alarms in 40 examples of 1 of 1 schemes" in page.closing([counts])[0]


OPTIONS = {"low": (0, 1, 2), "mid": (0, 1, 2), "high": (0, 1, 2)}


@pytest.mark.parametrize("assume", [None, lambda case: case.options["high"] != 2])
def test_the_first_examples_have_each_combination_of_options_on_each_mesh(assume):
    """The scheme is wrong for one combination of three options on one mesh."""
    doubled = scheme(
        reference=lambda x, **_: 2.0 * x, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp", options=OPTIONS,
        draw={"x": values("normal")}, dtypes=("float32",), assume=assume,
    )(lambda mesh, x, low, mid, high: 2 * x + ((low, mid, high, mesh.size("tp")) == (1, 2, 1, 2)))  # fmt: skip
    combined = run.combinations(doubled)
    assert len(combined) == (54 if assume is None else 36)
    counts = judge(doubled, 0, len(combined), seconds=600.0)
    assert len(counts.alarms) == 1 and counts.combinations == len(combined)
    assert counts.needs_more == (counts.examples.total() < EACH)


@pytest.mark.slow
def test_a_choice_within_rounding_is_undecided_and_no_alarm():
    ranked = scheme(
        reference=lambda x: jnp.argsort(x, stable=True).astype(x.dtype),
        mesh={"tp": (1,)},
        inputs={"x": "v"},
        outputs="v tp=I",
        nograd=("x",),
        dtypes=("bfloat16",),
        dims={"v": (8,)},
        draw={"x": values("normal", "ties")},
    )(lambda mesh, x: x.argsort(descending=True).flip(-1).to(x.dtype))
    counts = judge(ranked, 0, 60)
    assert counts.undecided and not counts.alarms
    assert sum(line.startswith("undecided: ") for line in page.sentences([counts])) == len(counts.undecided)


def test_time_ends_a_turn_after_one_example():
    assert judge(discover.lookup(SUM), 0, 100, seconds=0.0).examples.total() == 1


def test_shares_are_all_schemes_once():
    every = [each.key for each in schemes()]
    assert Counter(each.key for share in range(3) for each in schemes(share, 3)) == Counter(every)


def test_a_stopped_run_goes_on_where_it_stood(tmp_path, monkeypatch):
    journal, turns = tmp_path / "journal.jsonl", []
    monkeypatch.setattr(run, "schemes", lambda share, shares: [discover.lookup(SUM)])
    monkeypatch.setattr(run, "judge", lambda each, first, most: turns.append(first) or judge(each, first, min(most, 3)))
    run.main([str(journal), "0", "1", "5"])
    run.main([str(journal), "0", "1", "8"])
    assert turns == [0, 3, 5] and counts_of(journal)[SUM].examples.total() == 8
    assert len(journal.read_text().splitlines()) == 3


def test_a_scheme_that_was_not_judged_counts_as_none(tmp_path, monkeypatch):
    journal = tmp_path / "journal.jsonl"
    record = {"examples": {"float32": 3}, "conditions": 0, "worst": {}, "undecided": [], "alarms": [], "seconds": 1.0}
    journal.write_text(
        "".join(json.dumps(record | {"scheme": key, "key": key}) + "\n" for key in (SUM, "of:another tree"))
    )
    monkeypatch.setattr(run, "schemes", lambda: [discover.lookup(SUM), discover.lookup(TERM)])
    counts = run.all_counts([journal, tmp_path / "none.jsonl"])
    assert [(each.scheme, each.examples.total()) for each in counts] == [(SUM, 3), (TERM, 0)]
    assert (
        "in 3 examples of 1 of 2 schemes" in page.closing(counts)[0]
        and "there are 0 examples or more" in page.closing(counts)[2]
    )


def test_every_scheme_has_its_examples_before_time_decides(tmp_path, monkeypatch):
    slow, quick = (discover.lookup(f"parity_tests.collectives.test_schemes:{name}") for name in sorted(_names())[:2])
    record = {"conditions": 0, "worst": {}, "undecided": [], "alarms": []}
    rows = [
        record | {"scheme": slow.key, "key": slow.key, "examples": {"float32": run.EACH - 1}, "seconds": 900.0},
        record | {"scheme": quick.key, "key": quick.key, "examples": {"float32": run.EACH}, "seconds": 1.0},
    ]
    journal = tmp_path / "journal.jsonl"
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(run, "schemes", lambda share, shares: [slow, quick])
    turns = []
    monkeypatch.setattr(run, "judge", lambda each, first, most: turns.append(each.key) or judge(each, first, 1))
    run.main([str(journal), "0", "1", str(2 * run.EACH + 1)])
    assert turns == [slow.key, quick.key]


def _names() -> list[str]:
    of_file = "parity_tests.collectives.test_schemes"
    discover.lookup(SUM)
    return [key.rpartition(":")[2] for key in discover.TABLE if key.startswith(f"{of_file}:")]


@pytest.mark.parametrize(("examples", "words"), [(99_999, "the promise is made of 100000"), (100_000, "; promised")])
def test_the_page_says_how_many_examples_the_promise_needs(examples, words):
    counts = Counts("parity_tests.layouts.test_x:x", Counter(float32=examples), 7, {"float32": 0.5}, [], [], 1.0)
    text = page.text([counts])
    assert words in text and f"| layouts | 1 | {examples} | 7 | 0 | 0 | 0.50 / 0.00 |" in text
