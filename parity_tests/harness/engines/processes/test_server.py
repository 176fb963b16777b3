"""The fork server reads lines from its parent, notices the parent's end, and imports ahead what is safe."""

from __future__ import annotations

import importlib.util
import socket
import sys

import pytest
import torch

from shardproof.engines.processes.server import _import, _serve, warm


@pytest.mark.timeout(10)
@pytest.mark.parametrize("sent", [b"", b'{"kill": [1'])
def test_serving_ends_when_the_parent_ends_within_a_line(sent: bytes) -> None:
    parent, served = socket.socketpair()
    with parent, served:
        parent.sendall(sent)
        parent.shutdown(socket.SHUT_WR)
        assert not _serve(served, set(), (0, 0))


def test_a_line_may_come_in_two_reads() -> None:
    parent, served = socket.socketpair()
    with parent, served:
        parent.sendall(b'{"kill": ')
        parent.sendall(b"[]}\n")
        assert _serve(served, set(), (0, 0))


def test_nothing_is_differentiated_before_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's autograd counts the GPUs at its first call, after which no fork can use CUDA."""

    def differentiates(*_: object, **__: object) -> None:
        raise AssertionError("autograd has run in the fork server")

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", differentiates)
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(AssertionError, match="autograd has run"):
        torch.autograd.grad(x * x, x)
    warm()


@pytest.mark.parametrize("is_the_same", [True, False])
def test_a_package_from_another_place_is_not_imported_ahead(is_the_same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent may have a copy of its own, which the server would not find."""
    module = "wsgiref.headers"
    monkeypatch.delitem(sys.modules, module, raising=False)
    origin = importlib.util.find_spec("wsgiref").origin if is_the_same else "/elsewhere/wsgiref/__init__.py"
    _import([module, "wsgiref.of_the_parent_alone"], {"wsgiref": origin, "not_imported": None})
    assert (module in sys.modules) == is_the_same
