"""CPU time of ring attention over gloo processes, all ranks together, beside torch's attention in one process.

`python -m parity_tests.evidence.benchmarks.attention RANK WORLD FOLDER` runs one rank, without JAX. Rank 0 also has the
full sequence: in turn with the ring, it runs torch's attention on it while the other ranks wait.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parity_tests.evidence.benchmarks.accuracy import error_ratio
from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.operations import costliest
from parity_tests.evidence.benchmarks.ranks import run_ranks
from torch_impl.context_parallel import context_parallel_attention
from torch_impl.layouts import TokenLayout

SHAPE = (1, 4, 8192, 64)  # b h s p
SMALLER = (1, 4, 4096, 64)  # half the work a byte
SMALLEST = (1, 4, 2048, 64)  # a quarter, where messages, copies and calls weigh most
ROUNDS, WARM, PROMISED = 7, 1, 1.15


def figures(rounds: int = ROUNDS) -> Iterator[Figure]:
    """The ring's CPU time over torch's, by number of ranks, and for shorter sequences, where messages weigh more."""
    for shape, world in ((SHAPE, 2), (SHAPE, 4), (SMALLER, 4), (SMALLEST, 4)):
        yield figure_of(shape, world, rounds, is_promised=True)


def figure_of(shape: tuple[int, ...], world: int, rounds: int, is_promised: bool) -> Figure:
    """Run the ranks, compare, and time both in turn. Errors: RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps({"shape": shape, "rounds": rounds}))
        command = [sys.executable, "-m", "parity_tests.evidence.benchmarks.attention"]
        by_rank = run_ranks(command, world, folder, str(world), topic="attention", seconds=600)
    ring = [sum(seconds) for seconds in zip(*(rank["ring"] for rank in by_rank), strict=True)]
    full_seconds = by_rank[0]["whole"]
    ratios = [ours / theirs for ours, theirs in zip(ring, full_seconds, strict=True)]
    names = " ".join(f"{name}={size}" for name, size in zip("bhsp", shape, strict=True))
    is_kept = sorted(ratios)[len(ratios) // 2] <= PROMISED if is_promised else None
    return Figure(
        f"ring attention over {world} ranks, s={shape[2]}, CPU time of all",
        f"<= {PROMISED} times SDPA's in one process" if is_promised else "-",
        f"{spread(ratios)} times; {spread(ring)} s beside {spread(full_seconds)} s",
        is_kept,
        f"{names} float32, causal, dual_chunk_swap, forward and backward, {rounds} rounds in turn on gloo, one "
        f"thread a rank; error {by_rank[0]['error']:.2g} times SDPA's; median (least to greatest)"
        + ("" if is_kept is not False else f"; {by_rank[0]['operations']}"),
    )


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    sizes = json.loads((folder / "asked.json").read_text())
    b, h, s, p = sizes["shape"]
    group = dist.new_group(list(range(world)))
    layout = TokenLayout.dense("dual_chunk_swap", s, cp_size=world, cp_rank=rank)
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(b, s, h, p, generator=generator).transpose(1, 2) for _ in range(4)]  # q, k, v, cotangent
    share = [layout.shard(x.transpose(1, 2), 1).transpose(1, 2) for x in full]

    def ring() -> tuple[Tensor, ...]:
        return _differentiated(lambda *x: context_parallel_attention(*x, group=group, layout=layout), share)

    def alone() -> tuple[Tensor, ...]:
        return _differentiated(_sdpa, full)

    gathered = [layout.unshard(x.detach(), 2, group, gradient="I") for x in ring()]
    figures: dict[str, Any] = {"ring": [], "whole": [], "error": _relative_error(gathered, full) if rank == 0 else 0.0}
    for turn in range(WARM + sizes["rounds"]):
        for name, job, takes_part in (("ring", ring, True), ("whole", alone, rank == 0)):
            dist.barrier(group)
            seconds = _cpu_seconds(job) if takes_part else 0.0
            if turn >= WARM:
                figures[name].append(seconds)
    figures["operations"] = costliest(ring)
    (folder / f"found_{rank}.json").write_text(json.dumps(figures))
    dist.barrier(group)
    dist.destroy_process_group()


def _differentiated(attention: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Output, and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def _relative_error(ring: list[Tensor], tensors: list[Tensor]) -> float:
    """The ring's largest error over torch's in the same dtype. Errors: as `error_ratio`."""
    exact = _differentiated(_sdpa, [x.double() for x in tensors])
    return error_ratio(ring, _differentiated(_sdpa, tensors), exact, "the ring")


def _cpu_seconds(job: Callable[[], Any]) -> float:
    """CPU time of this process, including the threads that send messages."""
    start = time.process_time()
    job()
    return time.process_time() - start


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
