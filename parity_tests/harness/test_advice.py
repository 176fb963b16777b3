"""torch's advice on gathering is unsaid while commands run, and said again afterwards."""

import logging

import pytest

from parity_tests.faults.runner import killing_run
from parity_tests.harness import session
from parity_tests.harness.advice import SAID_BY, without_advice

SAID = logging.getLogger(SAID_BY)


def test_it_is_said_again_whatever_was_raised():
    before = SAID.level
    with pytest.raises(KeyError), without_advice():
        assert not SAID.isEnabledFor(logging.WARNING)
        raise KeyError
    assert SAID.level == before


class Looks:
    """Stands for the range in which faults are tried."""

    def outcome(self, fault):
        return SAID.isEnabledFor(logging.WARNING)


def test_it_is_unsaid_while_faults_are_planted_and_schemes_verified(monkeypatch):
    assert killing_run(["a fault"], Looks()) == [False]
    found = []
    monkeypatch.setattr(session.bridge, "start", lambda cache: found.append(SAID.isEnabledFor(logging.WARNING)))
    session.run([], session.Wanted())
    assert found == [False] and SAID.isEnabledFor(logging.WARNING)
