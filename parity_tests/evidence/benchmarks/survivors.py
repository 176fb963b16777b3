"""Processes that outlive a killed parent, and whether a loaded machine is taken for a stall."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.toy import toy, toy_case
from shardproof.engines.engines import run
from shardproof.engines.failure import RankFailure, Stalled

ROOT = Path(__file__).resolve().parents[3]
GRACE_S = 0.5
STALL_SECONDS, BUSY = 60.0, 4

# Prints the pids of server and ranks while these are in the given state, and stays there until it is killed.
PARENT = """
import threading, time
import torch, torch.distributed as dist
from parity_tests.evidence.benchmarks.toy import toy, toy_case
from shardproof.engines.processes import pool
from shardproof.engines.engines import run
def in_collective(mesh, case):
    if mesh.rank("tp"):
        dist.all_reduce(torch.ones(3), group=mesh["tp"])
    time.sleep(600)
def in_loop(mesh, case):
    while True:
        pass
def tell():
    time.sleep(1.0)
    print(*pool.pids(), flush=True)
case = toy_case(4, "gloo")
run(toy, case, "gloo")
threading.Thread(target=tell, daemon=True).start()
if {state!r} == "idle":
    time.sleep(600)
run({{"collective": in_collective, "loop": in_loop}}[{state!r}], case, "gloo", quiet_s=600)
"""


def figures(seconds: float = STALL_SECONDS) -> Iterator[Figure]:
    yield orphans()
    yield false_stalls(seconds)


def orphans() -> Figure:
    left: dict[str, int] = {}
    seen = 0
    for state in ("idle", "collective", "loop"):
        program = PARENT.format(state=state)
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            parent.send_signal(signal.SIGKILL)
        seen += len(pids)
        time.sleep(GRACE_S)
        left[state] = sum(_alive(pid) for pid in pids)
    return Figure(
        f"processes left {GRACE_S:g} s after SIGKILL of the parent",
        "0",
        f"{sum(left.values())} of {seen}: " + ", ".join(f"{count} in {state}" for state, count in left.items()),
        seen >= 12 and not any(left.values()),
        "server and 4 ranks, which were idle, in a collective, in a Python loop",
    )


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def false_stalls(seconds: float) -> Figure:
    """Healthy gloo examples beside processes that keep every core busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    stalled, other, waits = 0, 0, []
    try:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            began = time.perf_counter()
            try:
                run(toy, toy_case((2, 4, 8)[len(waits) % 3], "gloo").replace(seed=len(waits)), "gloo", quiet_s=1.5)
            except Stalled:
                stalled += 1
            except RankFailure:
                other += 1
            waits.append(time.perf_counter() - began)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return Figure(
        "false stalls on a loaded machine, gloo",
        "0 in 1,000 examples",
        f"{stalled} stalls and {other} other failures in {len(waits)} examples",
        stalled == other == 0 if len(waits) >= 1000 or stalled or other else None,
        f"{seconds:.0f} s at world 2, 4 and 8 in turn beside {BUSY} busy processes on {os.cpu_count()} cores, "
        f"quiet limit 1.5 s; an example took {spread([1000 * wait for wait in waits])} ms",
    )
