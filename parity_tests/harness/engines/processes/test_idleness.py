"""The time for which processes could compute: where they wait for a processor, a machine is to blame and not they."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

from shardproof.engines.processes import idleness
from shardproof.engines.processes.idleness import Idleness, Ready


def test_a_process_that_polls_is_idle_and_one_without_a_processor_is_not(monkeypatch):
    now = SimpleNamespace(clock=0.0, state="S", ticks=0)
    monkeypatch.setattr(idleness, "time", SimpleNamespace(monotonic=lambda: now.clock))
    monkeypatch.setattr(idleness, "_tree", lambda pid: [pid])
    monkeypatch.setattr(idleness, "_fields", lambda pid: [now.state, *"0" * 10, str(now.ticks), *"000"])
    idle = Idleness(1)
    found = []
    for state, share in (("S", 0.5), ("R", 0.015), ("S", 0.015), ("R", 0), ("R", 0), ("S", 0), ("S", 0.1), ("S", 0)):
        now.clock, now.state = now.clock + idleness.LOOK_S, state
        now.ticks += round(share * idleness.LOOK_S * idleness.TICKS)
        found.append(idle.look() / idleness.LOOK_S)
    assert found == [0, 1, 2, 3, 0, 1, 0, 1]


def test_time_without_a_processor_is_left_out(monkeypatch):
    now = SimpleNamespace(clock=0.0, delays={1: 5.0})
    monkeypatch.setattr(idleness, "time", SimpleNamespace(monotonic=lambda: now.clock))
    monkeypatch.setattr(Ready, "_delays_now", lambda _: now.delays)
    ready, seconds = Ready(1), 0.0
    for clock, delays, counted in (
        (1.0, {1: 5.0}, 1.0),
        (2.0, {1: 5.75}, 0.25),
        (3.0, {1: 5.75, 2: 9.0}, 1.0),  # a new process, which has waited before
        (4.0, {1: 5.75, 2: 9.5}, 0.5),
        (5.0, {1: 6.75, 2: 10.5}, 0.1),
        (9.0, {1: 6.75, 2: 10.5}, 2.0),  # a late look
    ):
        now.clock, now.delays = clock, delays
        seconds += counted
        assert ready.look(most_s=2.0) == seconds


def test_each_thread_of_a_process_may_wait_for_a_processor():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    file = Path(f"/proc/{os.getpid()}/task/{thread.native_id}/schedstat")
    try:
        before = int(file.read_text().split()[1]) / 1e9
        delay = Ready(os.getpid())._delays[file]
        assert before <= delay <= int(file.read_text().split()[1]) / 1e9
    finally:
        done.set()
        thread.join()
