"""The end of the default process group: the group is gone, and whoever handled interrupts does so afterwards."""

import signal
import threading

import pytest
import torch.distributed as dist

from torch_impl.parallelizer import _destroy_dist_connection


def own_handler(number, frame):
    raise AssertionError("an interrupt that nobody sent")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL, own_handler])
def handler(request):
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_the_group_is_gone_and_the_handler_back(group, handler):
    assert dist.is_initialized()
    _destroy_dist_connection()
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGINT) is handler


def test_as_often_as_one_likes(handler):
    for _ in range(3):
        _destroy_dist_connection()
        assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_is_ignored_meanwhile_and_an_error_passes(group, handler, monkeypatch):
    seen = []

    def destroyed():
        signal.raise_signal(signal.SIGINT)
        seen.append(signal.getsignal(signal.SIGINT))
        raise RuntimeError("it does not end")

    with monkeypatch.context() as patched:
        patched.setattr(dist, "destroy_process_group", destroyed)
        with pytest.raises(RuntimeError, match="it does not end"):
            _destroy_dist_connection()
    assert seen == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is handler


def test_another_thread_ends_the_group_and_leaves_signals_alone(group, handler):
    thread = threading.Thread(target=_destroy_dist_connection)
    thread.start()
    thread.join()
    assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_was_installed_from_c_is_left(group, monkeypatch):
    changed = []
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *arguments: changed.append(arguments))
    _destroy_dist_connection()
    assert not dist.is_initialized() and changed == []
