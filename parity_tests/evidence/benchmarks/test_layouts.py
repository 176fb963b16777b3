"""The comparison of indices runs, compares first, and reports its findings."""

import pytest
import torch

from parity_tests.evidence.benchmarks import layouts


def test_a_figure_of_few_sequences():
    one, all_ranks = layouts.figures((20,), rounds=1)
    assert (one.name, all_ranks.name) == ("index of one rank, 20 sequences", "layout of all ranks, 20 sequences")
    assert "times faster" in one.measured and (one.is_met is not None, all_ranks.is_met) == (True, None)


def test_arms_that_differ_are_not_timed(monkeypatch):
    monkeypatch.setattr(layouts, "by_loop", lambda offsets: torch.arange(3))
    with pytest.raises(RuntimeError) as caught:
        next(layouts.figures((20,), rounds=1))
    assert str(caught.value) == "benchmarks: two indices of 20 sequences differ; they are not timed"
