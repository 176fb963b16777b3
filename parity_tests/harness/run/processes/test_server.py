"""The fork server's side of its socket: what it does at the parent's end."""

from __future__ import annotations

import socket

import pytest

from parity_tests.harness.run.processes.server import _serve


@pytest.mark.timeout(10)
@pytest.mark.parametrize("sent", [b"", b'{"kill": [1'])
def test_a_parent_that_ends_in_the_middle_of_a_line_has_ended(sent: bytes) -> None:
    parent, served = socket.socketpair()
    with parent, served:
        parent.sendall(sent)
        parent.shutdown(socket.SHUT_WR)
        assert not _serve(served, set(), (0, 0))


def test_a_line_that_comes_in_two_reads_is_one() -> None:
    parent, served = socket.socketpair()
    with parent, served:
        parent.sendall(b'{"kill": ')
        parent.sendall(b"[]}\n")
        assert _serve(served, set(), (0, 0))
