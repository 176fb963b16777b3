"""The benchmark of filters runs on few columns, compares first, and reports its findings."""

import pytest
import torch

from parity_tests.evidence.benchmarks import filters
from parity_tests.evidence.benchmarks.accuracy import error_ratio
from parity_tests.evidence.benchmarks.filters import Filter, is_kept


@pytest.mark.slow
def test_figures_of_few_columns():
    rows = list(filters.figures(tokens=4, vocabulary=12000, rounds=1))
    assert [figure.name for figure in rows] == [f"{name} over full rows" for name in filters.FILTERS]
    assert all("times, by round" in figure.measured and figure.is_met is not None for figure in rows)


@pytest.mark.parametrize(
    ("kept", "want"),
    [
        (Filter(2, None, 1.0, 1.0), [False, True, True, False]),
        (Filter(3, None, 1.0, 1.0), [True, True, True, True]),
        (Filter(None, 0.5, 1.0, 1.0), [False, True, False, False]),
        (Filter(None, 0.6, 1.0, 1.0), [False, True, True, False]),
    ],
)
def test_tokens_that_full_rows_keep(kept, want):
    rows = torch.tensor([[0.15, 0.5, 0.2, 0.15]]).log()  # the third largest twice
    assert is_kept(rows, kept).tolist() == [want]


@pytest.mark.parametrize("off_by", [1.0, torch.nan])
def test_a_filter_that_is_wrong_is_not_timed(off_by):
    exact = (torch.zeros(2, dtype=torch.float64),)
    with pytest.raises(RuntimeError, match="it is not timed"):
        error_ratio((torch.zeros(2) + off_by,), (torch.full((2,), 1e-7),), exact, "a filter")
