"""The costliest operations of a job, by name."""

import torch

from parity_tests.evidence.benchmarks.operations import costliest


def test_the_costliest_operation_comes_first():
    x, calls = torch.randn(300, 300), []
    text = costliest(lambda: calls.append((x @ x).sum()))
    assert text.startswith("mm ") and " in 1 calls" in text
    assert len(calls) == 2  # the first one is not looked at
