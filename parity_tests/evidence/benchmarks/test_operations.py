"""The costliest operations of a job, by name."""

import torch

from parity_tests.evidence.benchmarks.operations import costliest


def test_the_costliest_operation_comes_first():
    x, calls = torch.randn(400, 400), []
    # twenty products take longer than one sum does even if the system interrupts the sum for a time slice
    text = costliest(lambda: calls.append(sum(x @ x for _ in range(20)).sum()))
    assert text.startswith("mm ") and "in 20 calls, " in text
    assert len(calls) == 2  # the first call is not measured
