"""Ctrl-C ends a run wherever it arrives."""

from __future__ import annotations

import gc
import signal
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from shardproof.endings.exit_status import INTERRUPTED
from shardproof.report.guard import delayed_interrupts, guarded

LONG_S = 20.0


class Referred:
    """An object that a weak reference can point to."""


def in_a_gc_callback(times: int) -> None:
    left = [None] * times

    def callback(phase: str, info: dict[str, int]) -> None:
        if left:
            left.pop()
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    try:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
    finally:
        gc.callbacks.remove(callback)


def in_a_finalizer(times: int) -> None:
    for _ in range(times):
        referred = Referred()
        ref = weakref.ref(referred, lambda _: signal.raise_signal(signal.SIGINT))
        del referred, ref
    del_ = type("Dying", (), {"__del__": lambda self: signal.raise_signal(signal.SIGINT)})
    del_()
    time.sleep(LONG_S)


@pytest.mark.slow
@pytest.mark.parametrize("where", [in_a_gc_callback, in_a_finalizer])
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_that_python_drops_ends_the_run(
    where: Callable[[int], None], times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert guarded(lambda: where(times)) == INTERRUPTED
    assert time.monotonic() - began < LONG_S
    assert capsys.readouterr().err == "shardproof: interrupted; what was not printed was not judged\n"


def test_other_exceptions_still_reach_pythons_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: reported.append(lost.exc_type))
    hook = sys.unraisablehook

    def failing(self: object) -> None:
        raise ArithmeticError

    with delayed_interrupts():
        type("Dying", (), {"__del__": failing})()
    assert reported == [ArithmeticError]
    assert sys.unraisablehook is hook
