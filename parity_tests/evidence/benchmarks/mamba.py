"""Hidden-parallel Mamba2 on packed sequences over gloo processes: the mixer's exchanges, forward and backward.

It is compared with a loop over the sequences, which slices each from five exchanged tensors and joins the slices, and
with the bare exchanges of either. Loop and ours are first compared, then timed in turn: CPU time of all ranks.
Run as `python -m parity_tests.evidence.benchmarks.mamba RANK FOLDER` it is one rank; no JAX is loaded there.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.mamba_loop import loop_post, loop_pre
from parity_tests.evidence.benchmarks.operations import costliest
from parity_tests.evidence.benchmarks.ranks import run_ranks
from shardproof.declare.counted import counted
from torch_impl.mamba import Mamba2Mixer, MambaContextParallel
from torch_impl.mamba.all_to_all import _all_to_all

WORLD = 2
SIZES = {"num_heads": 8, "head_dim": 4, "n_groups": 2, "d_state": 4}
TOKENS, SEQUENCES = 4096, (1, 16, 64, 256, 1000)
ROUNDS, WARM = 7, 2
LAYERS = 5  # in a row, as in a model; the loop, which takes long, runs once
FASTER = {64: 20.0, 256: 60.0}  # times a loop, by the number of sequences
BATCHES = 7  # in turn, more than the strategy caches layouts of
GROWTH = 1.2  # of 1,000 sequences over one
OVER_EXCHANGE = 2.0  # times the exchange of the same bytes


def figures(tokens: int = TOKENS, sequences: tuple[int, ...] = SEQUENCES, rounds: int = ROUNDS) -> Iterator[Figure]:
    """How many times faster than the loop, with the exchanges' time and without, and how it grows."""
    by_count, operations = measured(tokens, sequences, rounds)
    sizes = " ".join(f"{name}={size}" for name, size in SIZES.items())
    how = (
        f"{tokens} tokens in unequal sequences, {sizes}, float32, cp={WORLD} on gloo, one thread a rank, {rounds} "
        f"rounds in turn, {LAYERS} in a row but for the loop; pre_conv_ssm and post_conv_ssm with backward, each of "
        f"the next of {BATCHES} batches, whose layout is not cached; CPU time of both ranks; median (least to greatest)"
    )
    for count in sequences:
        yield from _beside_the_loop(count, by_count[str(count)], how)
        yield _over_the_exchange(count, by_count[str(count)], operations[str(count)])
    many, few = (by_count[str(count)]["ours"] for count in (sequences[-1], sequences[0]))
    growth = [a / b for a, b in zip(many, few, strict=True)]
    yield Figure(
        f"Mamba2 in and out, {sequences[-1]} sequences over {sequences[0]}",
        f"<= {GROWTH} times",
        f"{spread(growth)} times",
        statistics.median(growth) <= GROWTH,
        how,
    )


def _beside_the_loop(count: int, seconds: dict[str, list[float]], how: str) -> Iterator[Figure]:
    ours, loop, wire, wires = (seconds[name] for name in ("ours", "loop", "wire", "wires"))
    promised = FASTER.get(count)
    is_kept = {
        "with its exchange": [a / b for a, b in zip(loop, ours, strict=True)],
        "order alone": [
            (statistics.median(loop) - statistics.median(wires)) / (statistics.median(ours) - statistics.median(wire))
        ],
    }
    bound = statistics.median(loop) / statistics.median(wire)
    times = {"with its exchange": f"; the exchange alone {bound:.3g}; {spread([1e3 * each for each in ours])} ms"}
    for name, faster in is_kept.items():
        yield Figure(
            f"Mamba2 in and out, {counted(count, 'sequence')}, {name}",
            "-" if promised is None else f">= {promised:.0f} times faster than a loop",
            f"{spread(faster)} times faster than a loop" + times.get(name, ""),
            None if promised is None else statistics.median(faster) >= promised,
            how if name in times else "as before, less the median of its own exchanges on either side",
        )


def _over_the_exchange(count: int, seconds: dict[str, list[float]], operations: str) -> Figure:
    """Ours over its own exchange alone; where it is missed, with the operations of rank 0."""
    ours, wire = statistics.median(seconds["ours"]), statistics.median(seconds["wire"])
    is_kept = ours / wire <= OVER_EXCHANGE
    return Figure(
        f"Mamba2 in and out, {counted(count, 'sequence')}, over its exchange alone",
        f"<= {OVER_EXCHANGE:.0f} times",
        f"{ours / wire:.3g} times; {1e3 * ours:.3g} ms over {spread([1e3 * each for each in seconds['wire']])} ms",
        is_kept,
        "as before, median over median" + ("" if is_kept else f"; {operations}"),
    )


Seconds = dict[str, dict[str, list[float]]]  # of each arm and round, by the number of sequences


def measured(tokens: int, sequences: tuple[int, ...], rounds: int) -> tuple[Seconds, dict[str, str]]:
    """Seconds of both ranks, and the operations of rank 0. Errors: RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps({"tokens": tokens, "sequences": sequences, "rounds": rounds}))
        command = [sys.executable, "-m", "parity_tests.evidence.benchmarks.mamba"]
        by_rank = run_ranks(command, WORLD, folder, topic="mamba", seconds=900)
    operations = by_rank[0].pop("operations")
    seconds = {
        count: {arm: [sum(both) for both in zip(*(each[count][arm] for each in by_rank), strict=True)] for arm in arms}
        for count, arms in by_rank[0].items()
    }
    return seconds, operations


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    sizes, group = json.loads((folder / "asked.json").read_text()), dist.new_group(list(range(WORLD)))
    strategy = MambaContextParallel(group, **SIZES, mixer=Mamba2Mixer(1, **SIZES))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(sizes["tokens"] // WORLD, strategy.sizes.width, generator=generator)
    y = torch.randn(sizes["tokens"], strategy.d_inner_local, generator=generator)
    jobs = {count: arms(strategy, x, y, drawn_batches(sizes["tokens"], count)) for count in sizes["sequences"]}
    seconds: dict[int, dict[str, list[float]]] = {count: {name: [] for name in each} for count, each in jobs.items()}
    for each in jobs.values():
        check_alike(each["ours"](), each["loop"]())
    for turn in range(-WARM, sizes["rounds"]):
        for count, each in jobs.items():
            for name, job in each.items():
                if turn < 0 and name == "loop":  # it was warmed by the comparison
                    continue
                dist.barrier(group)
                start, times = time.process_time(), 1 if name == "loop" else LAYERS
                for _ in range(times):
                    job()
                if turn >= 0:
                    seconds[count][name].append((time.process_time() - start) / times)
    operations = {count: costliest(each["ours"]) for count, each in jobs.items()}
    (folder / f"found_{rank}.json").write_text(json.dumps({**seconds, "operations": operations}))
    dist.barrier(group)
    dist.destroy_process_group()


def arms(strategy: MambaContextParallel, x: Tensor, y: Tensor, batches: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """The timed arms by name: x goes in and y out of the mixer, then their cotangents back."""
    cu, in_turn = batches[0], itertools.cycle(batches)
    generator = torch.Generator().manual_seed(1)
    widths = strategy.local.width, strategy.d_inner_local
    shapes = (len(y), widths[0]), (len(x), strategy.d_inner)
    cotangents = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    sent = [torch.ones(len(y), width) for width in widths]

    def both_ways(pre: Callable[..., Tensor], post: Callable[..., Tensor], *options: Any) -> tuple[Tensor, ...]:
        leaves = x.detach().requires_grad_(), y.detach().requires_grad_()
        outputs = pre(leaves[0], *options), post(leaves[1], *options)
        return *(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, cotangents)

    def ours() -> tuple[Tensor, ...]:
        return both_ways(strategy.pre_conv_ssm, strategy.post_conv_ssm, next(in_turn))

    def loop() -> tuple[Tensor, ...]:
        return both_ways(loop_pre, loop_post, cu, strategy)

    def wire(sent: list[Tensor]) -> None:
        for buffer in (*sent, *reversed(sent)):
            _all_to_all(buffer, strategy.cp_group)

    one_by_one = [*sent[0].split(list(strategy.local.blocks), 1), sent[1]]
    return {
        "ours": ours,
        "loop": loop,
        "wire": lambda: wire(sent),
        "wires": lambda: wire([part.contiguous() for part in one_by_one]),
    }


def drawn_batches(tokens: int, count: int) -> list[Tensor]:
    """The offsets of BATCHES batches, no two equal: where there is one sequence, they end in more or less fill."""
    return [F.pad(drawn_offsets(tokens, count, number), (0, number), value=-1) for number in range(BATCHES)]


def drawn_offsets(tokens: int, count: int, number: int) -> Tensor:
    """So many unequal sequences, each of one unit of 2 * cp tokens or more."""
    units = tokens // (2 * WORLD)
    generator = torch.Generator().manual_seed(BATCHES * count + number)
    inside = torch.randperm(units - 1, generator=generator)[: count - 1].sort().values + 1
    return 2 * WORLD * torch.cat([torch.tensor([0]), inside, torch.tensor([units])])


def check_alike(ours: tuple[Tensor, ...], loop: tuple[Tensor, ...]) -> None:
    """Errors: RuntimeError if any of rows, result and gradient differs in a bit."""
    if not all(torch.equal(a, b) for a, b in zip(ours, loop, strict=True)):
        raise RuntimeError("benchmarks: the loop over sequences gives something else; it is not timed")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
