"""Log-probabilities among the tokens that a sampler keeps, beside full rows that an all_to_all makes.

The other way gives each rank full rows of some tokens, takes the k largest of them or sorts them, masks, takes
log_softmax, and sends the gradient back by another all_to_all. Both are first compared with float64, then timed in
turn: CPU time of the slower of two gloo ranks. Run as `python -m parity_tests.evidence.benchmarks.filters RANK FOLDER`
it is one rank; no JAX is loaded there.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parity_tests.evidence.benchmarks.accuracy import error_ratio
from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.operations import costliest
from parity_tests.evidence.benchmarks.ranks import run_ranks
from torch_impl.collectives.plain import all_gather_concat, all_to_all_equal
from torch_impl.vocab_parallel import DistributedLogprobWithSampling

WORLD, TOKENS, VOCABULARY = 2, 64, 131072
ROUNDS, WARM = 5, 1


class Filter(NamedTuple):
    """A filter on normal logits times `spread`, and the most that its time over the other way's may be."""

    top_k: int | None
    top_p: float | None
    spread: float
    at_most: float


FILTERS = {
    "top-k = 5000": Filter(5000, None, 1.0, 0.8),
    "top-p = 0.9 of flat rows": Filter(None, 0.9, 1.0, 0.3),
    "top-p = 0.9 of peaked rows": Filter(None, 0.9, 4.0, 0.06),
}


def figures(tokens: int = TOKENS, vocabulary: int = VOCABULARY, rounds: int = ROUNDS) -> Iterator[Figure]:
    """The time of each filter over the time with full rows, forward and backward."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps({"tokens": tokens, "vocabulary": vocabulary, "rounds": rounds}))
        command = [sys.executable, "-m", "parity_tests.evidence.benchmarks.filters"]
        by_rank = run_ranks(command, WORLD, folder, topic="filters", seconds=900)
    for name, limits in FILTERS.items():
        of_ranks = [of_rank[name] for of_rank in by_rank]
        ours, rows = (
            [max(both) for both in zip(*(of_rank[arm] for of_rank in of_ranks), strict=True)]
            for arm in ("ours", "rows")
        )
        ratio = statistics.median(ours) / statistics.median(rows)
        how = (
            f"b=1 s={tokens} v={vocabulary} float32, {WORLD} gloo ranks of one thread, forward and backward, {rounds} "
            f"rounds in turn, slower rank, CPU time, median over median (least to greatest); error "
            f"{max(of_rank['error'] for of_rank in of_ranks):.2g} times that of full rows"
        )
        is_kept = ratio <= limits.at_most
        by_round = spread([a / b for a, b in zip(ours, rows, strict=True)])
        times = "; ".join(f"{arm} {spread([1e3 * x for x in xs])} ms" for arm, xs in (("ours", ours), ("rows", rows)))
        yield Figure(
            f"{name} over full rows",
            f"<= {limits.at_most} times",
            f"{ratio:.3g} times, by round {by_round}; {times}",
            is_kept,
            how if is_kept else f"{how}; {of_ranks[0]['operations']}",
        )


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    group, sizes = dist.new_group(list(range(WORLD))), json.loads((folder / "asked.json").read_text())
    of_ranks = {}
    for name, limits in FILTERS.items():
        generator = torch.Generator().manual_seed(0)
        full = torch.randn(1, sizes["tokens"], sizes["vocabulary"], generator=generator) * limits.spread
        target, cotangent = full.argmax(-1), torch.randn(1, sizes["tokens"], generator=generator)
        logits = full.chunk(WORLD, -1)[rank].contiguous()
        start = rank * logits.shape[-1]
        arms: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            "ours": partial(ours, logits, target, cotangent, limits, group, start),
            "rows": partial(full_rows, logits, target, cotangent, limits, group),
        }
        exact = full_rows(logits.double(), target, cotangent.double(), limits, group)
        of_ranks[name] = {"error": error_ratio(arms["ours"](), arms["rows"](), exact, "a filter")}
        of_ranks[name] |= timed(arms, group, sizes["rounds"])
        of_ranks[name]["operations"] = costliest(arms["ours"])
    (folder / f"found_{rank}.json").write_text(json.dumps(of_ranks))
    dist.barrier(group)
    dist.destroy_process_group()


def timed(arms: dict[str, Callable[[], Any]], group: ProcessGroup, rounds: int) -> dict[str, Any]:
    """CPU seconds of this rank, by arm, in turn."""
    seconds: dict[str, Any] = {name: [] for name in arms}
    for turn in range(-WARM, rounds):
        for name, arm in arms.items():
            dist.barrier(group)
            start = time.process_time()
            arm()
            if turn >= 0:
                seconds[name].append(time.process_time() - start)
    return seconds


def ours(
    logits: Tensor, target: Tensor, cotangent: Tensor, limits: Filter, group: ProcessGroup, start: int
) -> tuple[Tensor, Tensor]:
    """Scores of all tokens, and the gradient of this rank's columns."""
    leaf = logits.detach().requires_grad_()
    options = limits.top_k, limits.top_p, False, 1.0, start, start + logits.shape[-1]
    out = DistributedLogprobWithSampling.apply(leaf, target, group, *options)
    return out.detach(), *torch.autograd.grad(out, leaf, cotangent)


def full_rows(
    logits: Tensor, target: Tensor, cotangent: Tensor, limits: Filter, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The same with full rows: rank r has all logits of the r-th part of the tokens."""
    rank, (b, s, v) = group.rank(), logits.shape
    local_rows = slice(rank * s // WORLD, (rank + 1) * s // WORLD)
    received = all_to_all_equal(logits.view(WORLD, s // WORLD, v), group)  # a part of the tokens to each rank
    rows = received.transpose(0, 1).flatten(1).requires_grad_()
    masked = rows.masked_fill(~is_kept(rows.detach(), limits), -torch.inf)
    wide = masked if masked.dtype == torch.float64 else masked.float()
    score = wide.log_softmax(-1).gather(-1, target[0, local_rows, None]).squeeze(-1)
    (d_rows,) = torch.autograd.grad(score, rows, cotangent[0, local_rows])
    sent = d_rows.unflatten(-1, (WORLD, v)).transpose(0, 1)
    gradient = all_to_all_equal(sent, group).view(b, s, v)
    return all_gather_concat(score.detach(), group, 0, [s // WORLD] * WORLD)[None], gradient


def is_kept(rows: Tensor, limits: Filter) -> Tensor:
    """The mask of the tokens that are kept."""
    if limits.top_p is None:
        assert limits.top_k is not None
        return rows >= rows.topk(limits.top_k).values[:, -1:]
    in_order, order = rows.sort(-1, descending=True)
    p = in_order.softmax(-1)
    return torch.empty_like(rows, dtype=torch.bool).scatter_(-1, order, p.cumsum(-1) - p < limits.top_p)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
