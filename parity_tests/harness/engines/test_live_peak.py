"""The meter of live memory, on code whose peak is known."""

import torch

from shardproof.engines.live_peak import LivePeak

N = 1024  # float32: 4096 bytes
BYTES = 4 * N


def test_freed_storage_is_not_counted_any_more():
    with LivePeak() as peak:
        a = torch.zeros(N)
        b = a + 1
        del a
        c = b + 1
        del b, c
    assert (peak.most, peak.now) == (2 * BYTES, 0)


def test_earlier_storage_and_its_views_are_not_counted():
    before = torch.zeros(N)
    with LivePeak() as peak:
        before.add_(1)
        view = before.view(2, -1)[1]
        total = view.sum()
    assert (peak.most, peak.now) == (4, 4) and total == N // 2


def test_a_slice_keeps_its_storage_alive():
    with LivePeak() as peak:
        part = torch.zeros(N)[:1]
        assert peak.now == BYTES
    assert peak.most == BYTES and part.numel() == 1


def test_lists_of_tensors_and_the_tensors_that_autograd_keeps():
    x = torch.ones(N, requires_grad=True)
    with LivePeak() as peak:
        halves = torch.split(x.exp(), N // 2)
        assert peak.now == BYTES
        y = torch.stack(halves).square().sum()
        del halves
        live = peak.now
        y.backward()
        del y
    assert live == 2 * BYTES + 4  # saved for backward: exp, and the stack for its square; and the sum
    assert x.grad is not None and peak.most > live
