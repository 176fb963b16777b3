"""The benchmark of Mamba2 runs on few tokens, compares first, and reports its findings."""

import pytest
import torch

from parity_tests.evidence.benchmarks import mamba


@pytest.mark.slow
def test_figures_of_few_tokens():
    rows = list(mamba.figures(tokens=64, sequences=(1, 16), rounds=1))
    assert [figure.name.removeprefix("Mamba2 in and out, ") for figure in rows] == [
        "1 sequence, with its exchange",
        "1 sequence, order alone",
        "1 sequence, over its exchange alone",
        "16 sequences, with its exchange",
        "16 sequences, order alone",
        "16 sequences, over its exchange alone",
        "16 sequences over 1",
    ]
    assert all("times" in figure.measured for figure in rows) and rows[-1].is_met is not None


def test_offsets_are_unequal_and_can_be_sharded():
    for count in (1, 3, 16):
        batches = mamba.drawn_batches(64, count)
        assert len({tuple(cu.tolist()) for cu in batches}) == mamba.BATCHES
        for cu in (cu[cu >= 0] for cu in batches):
            assert len(cu) == count + 1 and (cu[0], cu[-1]) == (0, 64)
            assert (cu.diff() > 0).all() and (cu % 4 == 0).all()


def test_a_loop_that_gives_something_else_is_not_timed():
    with pytest.raises(RuntimeError, match="it is not timed"):
        mamba.check_alike((torch.zeros(2),), (torch.ones(2),))
