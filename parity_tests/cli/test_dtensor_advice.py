"""torch's advice on gathering is unsaid while commands run, and said again afterwards."""

import logging

import pytest

from parity_tests.cli import session
from parity_tests.harness.run.dtensor_advice import SAID_BY, without_advice
from parity_tests.injected_bugs.runner import run_bugs


def is_said(level=logging.WARNING):
    """Whether the logger lets a record of this level through."""
    logger = logging.getLogger(SAID_BY)
    return logger.isEnabledFor(level) and bool(
        logger.filter(logger.makeRecord(SAID_BY, level, "", 0, "advice", (), None))
    )


def test_the_advice_returns_after_an_exception():
    with pytest.raises(KeyError), without_advice():
        assert not is_said()
        assert is_said(logging.ERROR)
        raise KeyError
    assert is_said()


def test_ranks_that_leave_in_the_order_in_which_they_came():
    first, second = without_advice(), without_advice()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_said()
    second.__exit__(None, None, None)
    assert is_said()


class Looks:
    """Stands for the runner of injected bugs."""

    def outcome(self, bug):
        return is_said()


def test_it_is_silent_while_bugs_are_injected_and_schemes_verified(monkeypatch):
    assert run_bugs(["a bug"], Looks()) == [False]
    enabled = []
    monkeypatch.setattr(session.bridge, "start", lambda cache: enabled.append(is_said()))
    session.run([], session.VerifyOptions())
    assert enabled == [False] and is_said()
