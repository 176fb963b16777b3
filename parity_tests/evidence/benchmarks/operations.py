"""The CPU time of a job by operation, which a page shows beside a missed figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

SHOWN = 8  # operations


def costliest(job: Callable[[], Any]) -> str:
    """The operations that take longest themselves, each with its share of the time and its calls, after one warm run.

    A call through torch.compile is one operation.
    """
    job()
    # One cycle; acc_events only keeps torch 2.11 from warning that there could be more.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        job()
    events = sorted(profiler.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in events) or 1.0
    shares = (
        f"{event.key.removeprefix('aten::')} {event.self_cpu_time_total / total:.0%} in {event.count} calls"
        for event in events[:SHOWN]
    )
    return ", ".join(shares)
