"""Advice on speed is silent while commands run, and logged again afterwards."""

import logging

import pytest

from parity_tests.evidence.injected_bugs.runner import run_bugs
from shardproof.cli import session
from shardproof.engines.speed_advice import LOGGERS, without_advice


def is_logged(level=logging.WARNING):
    """Whether the loggers let a record of this level through: all of them or none."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    records = [logger.makeRecord(logger.name, level, "", 0, "advice", (), None) for logger in loggers]
    passed = {
        logger.isEnabledFor(level) and bool(logger.filter(record))
        for logger, record in zip(loggers, records, strict=True)
    }
    (is_passed,) = passed
    return is_passed


def test_the_advice_returns_after_an_exception():
    with pytest.raises(KeyError), without_advice():
        assert not is_logged()
        assert is_logged(logging.ERROR)
        raise KeyError
    assert is_logged()


def test_ranks_that_leave_in_the_order_in_which_they_came():
    first, second = without_advice(), without_advice()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_logged()
    second.__exit__(None, None, None)
    assert is_logged()


class Looks:
    """Stands for the runner of injected bugs."""

    def outcome(self, bug):
        return is_logged()


def test_it_is_silent_while_bugs_are_injected_and_schemes_verified(monkeypatch):
    assert run_bugs(["a bug"], Looks()) == [False]
    enabled = []
    monkeypatch.setattr(session.bridge, "start", lambda cache: enabled.append(is_logged()))
    session.run([], session.VerifyOptions())
    assert enabled == [False] and is_logged()
