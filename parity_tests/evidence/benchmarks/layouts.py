"""The index of a packed batch beside the loop over sequences that it replaces, on one core.

The loop makes two ranges for each sequence and joins them, as one rank of four needs them, from offsets that are on the
host already. Beside it stand the index of one rank, and a full layout, which has every rank's. All are first compared,
then timed in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parity_tests.evidence.benchmarks.figure import Figure, spread
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.index_arrays import packed_positions as positions

CP, RANK = 4, 1
SEQUENCES = (1_000, 100_000)
ROUNDS, PROMISED = 7, 20.0


def figures(sequences: tuple[int, ...] = SEQUENCES, rounds: int = ROUNDS) -> Iterator[Figure]:
    """How many times faster, for each number of sequences."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of several, the one that is timed would wait for the others
    try:
        for count in sequences:
            yield from _figures_of(count, rounds)
    finally:
        torch.set_num_threads(threads)


def _figures_of(count: int, rounds: int) -> Iterator[Figure]:
    offsets = drawn_offsets(count)
    for job in ARMS.values():
        if not torch.equal(job(offsets), by_loop(offsets)):
            raise RuntimeError(f"benchmarks: two indices of {count} sequences differ; they are not timed")
    loop = [_seconds(by_loop, offsets) for _ in range(rounds)]
    how = f"{int(offsets[-1])} tokens, cp={CP}, {rounds} rounds, seconds of one core; median (least to greatest)"
    for name, job in ARMS.items():
        times = [_seconds(job, offsets) for _ in range(rounds)]
        ratios = [a / b for a, b in zip(loop, times, strict=True)]
        text = f"{spread(ratios)} times faster; {spread([1e3 * seconds for seconds in times])} ms"
        is_kept = sorted(ratios)[rounds // 2] >= PROMISED if name in PROMISING else None
        promised = f">= {PROMISED:.0f} times faster than a loop" if name in PROMISING else "-"
        yield Figure(f"{name}, {count} sequences", promised, text, is_kept, how)


def drawn_offsets(count: int) -> Tensor:
    """Sequences of none to eight units of 2 * cp tokens."""
    units = torch.randint(0, 9, (count,), generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.pad((2 * CP * units).cumsum(0), (1, 0)).int()


def one_rank(offsets: Tensor) -> Tensor:
    """The loop's result, with checked offsets."""
    return positions(int(offsets[-1]), CP, RANK, offsets)


def whole_layout(offsets: Tensor) -> Tensor:
    """As a batch asks for it the first time: a tensor that no layout was made for."""
    return TokenLayout.packed(offsets.clone(), cp_size=CP, cp_rank=RANK).local_index


def by_loop(offsets: Tensor) -> Tensor:
    """Chunk r and chunk 2 * cp - 1 - r of each sequence, one after another."""
    pieces = []
    for start, stop in pairwise(offsets.tolist()):
        chunk = (stop - start) // (2 * CP)
        for part in (RANK, 2 * CP - 1 - RANK):
            pieces.append(torch.arange(start + part * chunk, start + (part + 1) * chunk))
    return torch.cat(pieces)


ARMS = {"index of one rank": one_rank, "layout of all ranks": whole_layout}
PROMISING = ("index of one rank",)


def _seconds(job: Callable[[Tensor], Any], offsets: Tensor) -> float:
    start = time.thread_time()  # the core's own time: other programs may run beside
    job(offsets)
    return time.thread_time() - start
