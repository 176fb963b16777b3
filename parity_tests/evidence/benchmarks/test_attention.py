"""The benchmark of attention runs on few tokens, compares first, and reports its findings."""

import pytest
import torch

from parity_tests.evidence.benchmarks import attention


@pytest.mark.slow
def test_a_figure_of_few_tokens():
    figure = attention.figure_of((1, 2, 16, 8), 2, 1, True)
    assert figure.name == "ring attention over 2 ranks, s=16, CPU time of all"
    assert " times; " in figure.measured and "b=1 h=2 s=16 p=8" in figure.how and figure.is_met is not None


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("off_by", [1.0, torch.nan])
def test_a_ring_that_is_wrong_is_not_timed(which, off_by):
    tensors = list(torch.ones(4, 1, 1, 4, 8))
    wrong = list(attention._differentiated(attention._sdpa, tensors))
    wrong[which] = wrong[which] + off_by
    with pytest.raises(RuntimeError, match="it is not timed"):
        attention._relative_error(wrong, tensors)
