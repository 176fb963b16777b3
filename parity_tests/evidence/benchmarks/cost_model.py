"""Compare the cost model with gloo on this CPU: fit links to messages alone, then predict and time collectives.

`python -m parity_tests.evidence.benchmarks.cost_model` prints the table of docs/reference/cost.md. Times are the
minimum of many, because other work on the machine only adds to them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from parity_tests.evidence.benchmarks.ranks import run_ranks
from shardproof.cost.links import price
from shardproof.cost.placement import Placement
from shardproof.cost.sheet import Algorithm, Sheet

RANKS = 2
SIZES = (2**12, 2**16, 2**18, 2**20)  # of input; longer calls outlast a time slice of a shared core
REPEATS = 40
SECONDS = 300.0  # for the whole measurement
FITTED = "send"
ELEMENT = 4
# torch 2.13 renames the single-tensor forms and deprecates the old names; 2.11 knows only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Times = Mapping[str, Mapping[int, float]]  # op -> bytes of input -> seconds


def fitted(times: Mapping[int, float]) -> Sheet:
    """The sheet of one host that reproduces the measured times of the smallest and the largest message."""
    small, large = min(times), max(times)
    bandwidth = (large - small) / max(times[large] - times[small], 1e-9)
    wait = max(times[small] - small / bandwidth, 0.0)
    ring = Algorithm("ring", "gloo", 1.0, 0.0, wait, wait)
    return Sheet("gloo", 2**20, bandwidth, bandwidth, (ring,), measured="fitted to send on this CPU")


def predicted(op: str, size: int, ranks: int, sheet: Sheet) -> float:
    return price(op, 1, size, Placement(ranks, 1, ranks), sheet).seconds


def table(times: Times, ranks: int) -> str:
    """Measured and modelled milliseconds and their ratio; the fitted op comes first."""
    sheet = fitted(times[FITTED])
    lines = [f"{'op':14}  {'bytes':>10}  {'measured ms':>11}  {'model ms':>9}  measured / model"]
    for op, by_size in times.items():
        for size, seconds in by_size.items():
            model = predicted(op, size, ranks, sheet)
            row = f"{op:14}  {size:10,}  {1e3 * seconds:11.3f}  {1e3 * model:9.3f}  {seconds / model:16.2f}"
            lines.append(row + ("  (fitted)" if op == FITTED and size in (min(by_size), max(by_size)) else ""))
    return "\n".join(lines)


def slowest(rank_times: Sequence[Times]) -> Times:
    """Each op's time on its slowest rank."""
    ops = rank_times[0]
    return {op: {size: max(float(each[op][size]) for each in rank_times) for size in ops[op]} for op in ops}


# On a rank


def calls_of(size: int, rank: int, world: int) -> dict[str, Callable[[], object]]:
    """Each op on `size` bytes of input."""
    x = torch.ones(size // ELEMENT)
    received, gathered, scattered = torch.empty_like(x), torch.empty(world * len(x)), torch.empty(len(x) // world)

    def message() -> None:
        ends = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    return {
        "send": message,
        "all_gather": lambda: _all_gather(gathered, x),
        "reduce_scatter": lambda: _reduce_scatter(scattered, x),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_to_all": lambda: dist.all_to_all_single(received, x),
        "broadcast": lambda: dist.broadcast(x, 0),
    }


def timed(rank: int, world: int) -> dict[str, dict[int, float]]:
    """The minimum time of each op and size on this rank; ranks start each call together."""
    times: dict[str, dict[int, float]] = {}
    for size in SIZES:
        for op, call in calls_of(size, rank, world).items():
            shortest = float("inf")
            for _ in range(REPEATS):
                dist.barrier()
                start = time.perf_counter()
                call()
                shortest = min(shortest, time.perf_counter() - start)
            times.setdefault(op, {})[size] = shortest
    return times


def _rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    (folder / f"found_{rank}.json").write_text(json.dumps(timed(rank, RANKS)))
    dist.destroy_process_group()


def measure() -> Times:
    """Times of gloo between two processes on this machine."""
    command = [sys.executable, "-m", "parity_tests.evidence.benchmarks.cost_model"]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(command, RANKS, Path(folder), topic="cost", seconds=SECONDS)
    by_size = [{op: {int(size): each for size, each in row.items()} for op, row in ops.items()} for ops in found]
    return slowest(by_size)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _rank(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        print(table(measure(), RANKS))
