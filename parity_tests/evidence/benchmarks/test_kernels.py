"""The benchmark of the kernels names the parts that did not run, and measures the others on any device."""

import torch

from parity_tests.evidence.benchmarks import kernels
from parity_tests.vocab_parallel.rounding import equal_to_rounding


def test_without_a_gpu_every_promise_is_reported_as_not_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures = list(kernels.figures())
    assert {figure.name: figure.promised for figure in figures} == kernels.PROMISES
    assert {(figure.measured, figure.is_met) for figure in figures} == {("not run: needs CUDA", None)}


def test_arms_are_checked_and_timed_in_turn_on_whatever_there_is():
    figures = list(kernels.measured(torch.device("cpu"), 8, 64, ("eager",), rounds=3))
    assert figures[0].name == "copy of the logits"
    assert {"statistics, eager", "gradient, eager", "a call alone, eager"} <= {f.name for f in figures}
    assert all("to" in figure.measured for figure in figures)


def test_a_peer_computes_the_negative_gradient():
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs = kernels.logprob_and_gradient(logits, "eager"), kernels.peer_jobs()["cross_entropy"](logits)
    assert equal_to_rounding(ours, -theirs)


def test_an_arm_that_is_wrong_is_not_timed(monkeypatch):
    healthy = kernels.fused_logprob.implementation_of
    monkeypatch.setattr(
        kernels.fused_logprob, "implementation_of", lambda f, b: lambda *a, **k: wrong(healthy(f, b)(*a, **k))
    )

    def wrong(tensor):
        return None if tensor is None else tensor * 2

    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        kernels.check(logits, ("eager",))
    except RuntimeError as error:
        assert "budgets off its twin; it is not timed" in str(error)
    else:
        raise AssertionError("a wrong arm was let pass")
