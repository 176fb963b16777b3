"""A batch of packed rows as one stream (THD), beside the few operations that it is usually written with.

These operations flatten the tensors, drop the fill of both tables of lengths, sum the rest, and find padding by
token ids. They validate nothing, and a padding id inside a sequence would be masked. CPU time of one core, in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.operations import costliest
from torch_impl.context_parallel import process_input_for_thd

ROWS, SLOTS, FILL = 8, 125, -1000
ROUNDS, CALLS, AT_MOST = 15, 40, 0.8

Prepared = dict[str, Any]


def figures(rounds: int = ROUNDS, calls: int = CALLS) -> Iterator[Figure]:
    """The time over the plain preparation's, with positions in the batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with several, the timed thread would wait for the others
    try:
        yield _figure_of(drawn_batch(), rounds, calls)
    finally:
        torch.set_num_threads(threads)


def _figure_of(batch: Prepared, rounds: int, calls: int) -> Figure:
    if differing := differences(process_input_for_thd(batch), plain(batch)):
        raise RuntimeError(f"benchmarks: {', '.join(differing)} differ; they are not timed")
    arms = {"ours": process_input_for_thd, "plain": plain}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            seconds[name].append(_seconds(arm, batch, calls))
    ratio = statistics.median(seconds["ours"]) / statistics.median(seconds["plain"])
    rows, size = batch["input_ids"].shape
    how = (
        f"{rows} rows of {size} tokens with {SLOTS} sequences each, {rounds} rounds of {calls} calls in turn, seconds "
        "of one core; median over median (least to greatest)"
    )
    times = "; ".join(
        f"{name} {spread([1e6 * each for each in each_round])} us" for name, each_round in seconds.items()
    )
    is_kept = ratio <= AT_MOST
    return Figure(
        f"THD batch of {rows * SLOTS} sequences over the plain preparation",
        f"<= {AT_MOST} times",
        f"{ratio:.3g} times; {times}",
        is_kept,
        how if is_kept else f"{how}; {costliest(lambda: process_input_for_thd(batch))}",
    )


def drawn_batch() -> Prepared:
    """Rows of unequal sequences, each with padding at its end; id 0 is padding and nothing else."""
    generator = torch.Generator().manual_seed(0)
    slots = 4 * torch.randint(1, 17, (ROWS, SLOTS), generator=generator)
    real = slots - torch.randint(0, 4, (ROWS, SLOTS), generator=generator)
    size = int(slots.sum(1).max())
    slots[:, -1] += size - slots.sum(1)
    place = torch.arange(size).expand(ROWS, size).contiguous()
    ends = slots.cumsum(1)
    slot = torch.searchsorted(ends, place, right=True)
    positions = place - (ends - slots).gather(1, slot)
    ids = torch.randint(1, 1000, (ROWS, size), generator=generator).masked_fill(positions >= real.gather(1, slot), 0)
    tables = [torch.nn.functional.pad(lengths, (0, 3), value=FILL) for lengths in (real, slots)]
    return {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
        "position_ids": positions,
        "seq_lens": tables[0],
        "seq_lens_padded": tables[1],
    }


def plain(batch: Prepared) -> Prepared:
    """The usual way: no table is read by the host, nothing is checked."""
    total = batch["input_ids"].numel()
    out = {name: batch[name].reshape(total) for name in ("input_ids", "labels", "position_ids")}
    for name, lengths in (("cu_seqlens", batch["seq_lens"]), ("cu_seqlens_padded", batch["seq_lens_padded"])):
        flat = lengths.reshape(-1)
        real = flat[flat != FILL]
        out[name] = torch.cat([torch.zeros(1, dtype=real.dtype), real.cumsum(0)]).to(torch.int32)
    out["max_seqlen"] = out["cu_seqlens_padded"].diff().max()
    out["padding_mask"] = out["input_ids"] == 0
    return out


def differences(a: Prepared, b: Prepared) -> list[str]:
    """The keys with unequal tensors."""
    return [name for name in sorted({*a, *b}) if name not in a or name not in b or not _equal(a[name], b[name])]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _seconds(arm: Callable[[Prepared], Any], batch: Prepared, calls: int) -> float:
    start = time.thread_time()  # the core's own time: other programs may run beside
    for _ in range(calls):
        arm(batch)
    return (time.thread_time() - start) / calls
