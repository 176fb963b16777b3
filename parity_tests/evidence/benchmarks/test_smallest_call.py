"""The comparison of smallest calls runs, compares first, and prints the ratio."""

import pytest
import torch

from parity_tests.evidence.benchmarks import smallest_call


def test_a_figure_for_each_function():
    rows = list(smallest_call.figures(rounds=1, calls=2))
    assert [figure.name.partition(" over")[0] for figure in rows] == list(smallest_call.LIMITS)
    assert all("times;" in figure.measured and figure.is_met is not None for figure in rows)


def test_arms_that_differ_are_not_timed(monkeypatch):
    def wrong(logits, ids, *groups, **settings):
        return torch.zeros(ids.shape)

    monkeypatch.setattr(smallest_call, "vocab_parallel_logprob", wrong)
    with pytest.raises(RuntimeError) as caught:
        next(smallest_call.figures(rounds=1, calls=1))
    assert str(caught.value) == "benchmarks: two log-probabilities differ; they are not timed"
