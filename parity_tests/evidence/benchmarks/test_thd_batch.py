"""The benchmark of a packed batch runs, compares first, and reports its findings."""

import pytest
import torch

from parity_tests.evidence.benchmarks import thd_batch


def test_a_figure_of_few_calls():
    (figure,) = thd_batch.figures(rounds=1, calls=1)
    assert figure.name == "THD batch of 1000 sequences over the plain preparation"
    assert "times;" in figure.measured and figure.is_met is not None


def test_arms_that_differ_are_not_timed(monkeypatch):
    monkeypatch.setattr(thd_batch, "plain", lambda batch: {"input_ids": torch.zeros(3)})
    with pytest.raises(RuntimeError) as caught:
        next(thd_batch.figures(rounds=1, calls=1))
    assert str(caught.value) == (
        "benchmarks: cu_seqlens, cu_seqlens_padded, input_ids, labels, max_seqlen, padding_mask, position_ids differ; "
        "they are not timed"
    )
