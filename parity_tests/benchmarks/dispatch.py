"""Dispatch and combine over gloo processes beside their bare messages and Megatron-core's: CPU time of all ranks.

Run as `python -m parity_tests.benchmarks.dispatch RANK WORLD FOLDER` it is one rank; no JAX is loaded there. Experts
return their rows as they are, so that an arm does what is around them and nothing else; its output and its gradients
of tokens and of gates are compared first.
"""

from __future__ import annotations

import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding_bag

from parity_tests.benchmarks.accuracy import error_ratio
from parity_tests.benchmarks.figure import Figure, spread
from parity_tests.benchmarks.operations import costliest
from parity_tests.benchmarks.peer_arms import missing
from parity_tests.benchmarks.ranks import found_by
from torch_impl.expert_parallel.dispatch import Exchange, exchange_of, sorted_choices

WORLD = 4
ROUNDS, WARM = 9, 2
PROMISED = 1.3
WIRE, FLOOR, OURS, MEGATRON = "wire", "floor", "ours", "megatron-core"
# By default glibc returns each large buffer to the system and pays for its pages again, which costs more than the
# messages; with these settings it keeps freed buffers, as the allocator of a device does.
KEEPS_PAGES = ("MALLOC_MMAP_MAX_=0", "MALLOC_TRIM_THRESHOLD_=100000000000")


@dataclass(frozen=True)
class Sizes:
    """`tokens` of all ranks together, of width d, each with k of the experts."""

    tokens: int = 8192
    d: int = 1024
    experts: int = 64
    k: int = 8


def figures(rounds: int = ROUNDS) -> Iterator[Figure]:
    """Ours over the bare messages and over Megatron-core's in each dtype; then with the default allocation."""
    for dtype in ("float32", "bfloat16"):
        yield from figures_of(Sizes(), dtype, WORLD, rounds, keeps_pages=True)
    yield from figures_of(Sizes(), "float32", WORLD, rounds, keeps_pages=False)


def figures_of(sizes: Sizes, dtype: str, world: int, rounds: int, keeps_pages: bool) -> Iterator[Figure]:
    """Run the ranks, compare, and time all arms in turn. Errors: RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sizes.json").write_text(json.dumps({"sizes": asdict(sizes), "dtype": dtype, "rounds": rounds}))
        settings = ["env", *KEEPS_PAGES] if keeps_pages else []
        command = [*settings, sys.executable, "-m", "parity_tests.benchmarks.dispatch"]
        by_rank = found_by(command, world, folder, str(world), topic="dispatch", seconds=600)
    totals = {
        arm: [sum(seconds) for seconds in zip(*(rank["seconds"][arm] for rank in by_rank), strict=True)]
        for arm in by_rank[0]["seconds"]
    }
    allocation = "freed buffers kept" if keeps_pages else "default allocation"
    names = " ".join(f"{name}={size}" for name, size in asdict(sizes).items())
    how = (
        f"{names} over {world} gloo ranks of one thread, {dtype}, {allocation}, forward and backward, {rounds} rounds "
        "in turn, CPU time of all ranks together; ratio of medians, then round by round median (least to greatest)"
    )
    for over, at_most in ((WIRE, PROMISED), (MEGATRON, 1.0)):
        title = f"dispatch and combine over {over}, {dtype}, {allocation}"
        promised = (f"<= {at_most} times" if over == WIRE else "less") if keeps_pages else "-"
        if over not in totals:
            yield Figure(title, promised, by_rank[0]["missing"], None, how)
            continue
        ratio = _median(totals[OURS]) / _median(totals[over])
        is_met = (ratio <= at_most if over == WIRE else ratio < at_most) if keeps_pages else None
        where = _beside_megatron(by_rank[0]) if over == MEGATRON else _where(totals, by_rank[0])
        yield Figure(title, promised, _measured(totals, over, ratio), is_met, f"{how}; {where}")


def _measured(totals: Mapping[str, list[float]], over: str, ratio: float) -> str:
    rounds = [ours / other for ours, other in zip(totals[OURS], totals[over], strict=True)]
    ours, other = (spread([1e3 * seconds for seconds in totals[name]]) for name in (OURS, over))
    return f"{ratio:.3g} times, by round {spread(rounds)}; {ours} ms beside {other} ms"


def _where(totals: Mapping[str, list[float]], rank: Mapping[str, Any]) -> str:
    """What the wire is, what no dispatch can do without, and where our time goes."""
    floor = _median(totals[FLOOR]) / _median(totals[WIRE])
    return (
        f"the wire is the same all_to_alls between buffers that are there already; {floor:.3g} times with the rows "
        "read to be sent, sorted by expert and back, and summed by token, forward and backward, without gates; "
        f"ours: {rank['operations']}"
    )


def _beside_megatron(rank: Mapping[str, Any]) -> str:
    return f"MoEAlltoAllTokenDispatcher, its rows times their gates; error {rank['error']:.2g} times its own"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    group = dist.new_group(list(range(world)))
    setting = json.loads((folder / "sizes.json").read_text())
    tokens = _drawn(Sizes(**setting["sizes"]), rank, world, getattr(torch, setting["dtype"]))
    arms: dict[str, Callable[[], list[Tensor] | None]] = {
        WIRE: Wire.of(tokens, group).messages,
        FLOOR: Wire.of(tokens, group).messages_and_passes,
        OURS: lambda: tokens.differentiated(lambda x, gates: our_layer(tokens, x, gates, group)),
    }
    reason = missing(MEGATRON)
    if reason is None:
        from parity_tests.benchmarks.megatron_dispatcher import megatron_layer

        layer = megatron_layer(tokens.num_experts, tokens.experts, tokens.x.shape[1], group)
        arms[MEGATRON] = lambda: tokens.differentiated(layer)
    figures: dict[str, Any] = {"missing": reason, "seconds": {name: [] for name in arms}}
    figures["error"] = _compared(tokens, {name: arm() for name, arm in arms.items() if name not in (WIRE, FLOOR)})
    for turn in range(WARM + setting["rounds"]):
        for name, arm in arms.items():
            dist.barrier(group)
            start = time.process_time()  # of this process, the threads of the messages included
            arm()
            if turn >= WARM:
                figures["seconds"][name].append(time.process_time() - start)
    figures["operations"] = costliest(arms[OURS])
    (folder / f"found_{rank}.json").write_text(json.dumps(figures))
    dist.barrier(group)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Tokens:
    """This rank's tokens, their choices, and the cotangent of what comes of them."""

    x: Tensor
    gates: Tensor
    experts: Tensor
    cotangent: Tensor
    num_experts: int

    def differentiated(self, layer: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """Output, and the gradients of tokens and gates."""
        x, gates = self.x.detach().requires_grad_(), self.gates.detach().requires_grad_()
        y = layer(x, gates)
        return [y.detach(), *torch.autograd.grad(y, (x, gates), self.cotangent)]


def _drawn(sizes: Sizes, rank: int, world: int, dtype: torch.dtype) -> Tokens:
    generator = torch.Generator().manual_seed(rank)
    shape = sizes.tokens // world, sizes.d
    x, cotangent = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    probabilities = torch.randn(shape[0], sizes.experts, generator=generator).softmax(-1)
    gates, experts = probabilities.topk(sizes.k)
    return Tokens(x, gates.to(dtype), experts, cotangent, sizes.experts)


def our_layer(tokens: Tokens, x: Tensor, gates: Tensor, group: ProcessGroup) -> Tensor:
    """The lines of `routed_experts`, without what experts make of the rows."""
    choices = sorted_choices(tokens.experts, tokens.num_experts)
    exchange = exchange_of(choices.counts, group, None)
    choices = choices.first(sum(exchange.to_ranks))
    rows = exchange.dispatched(choices.rows(x), group, None)
    return choices.weighed_sums(exchange.returned(rows, group, None), gates, x.dtype)


@dataclass(frozen=True)
class Wire:
    """The messages of a layer, between buffers that are there already, `there` of rows by choice, `here` by expert."""

    tokens: Tokens
    exchange: Exchange
    order: Tensor
    there: Tensor
    here: Tensor
    by_expert: Tensor
    group: ProcessGroup

    @staticmethod
    def of(tokens: Tokens, group: ProcessGroup) -> Wire:
        choices = sorted_choices(tokens.experts, tokens.num_experts)
        exchange = exchange_of(choices.counts, group, None)
        there = tokens.x.new_ones(sum(exchange.to_ranks), tokens.x.shape[1])
        here, by_expert = (there.new_ones(sum(exchange.from_ranks), there.shape[1]) for _ in range(2))
        return Wire(tokens, exchange, choices.order, there, here, by_expert, group)

    def messages(self) -> None:
        """Counts, and rows there and back, forward and backward."""
        self._exchange_counts()
        for _ in ("forward", "backward"):
            self._send()
            self._return()

    def messages_and_passes(self) -> None:
        """With the rows of tokens read, sorted by expert and by source, and summed by token."""
        k = self.tokens.experts.shape[1]
        row_of_place = self.order.argsort()
        starts = torch.arange(0, len(self.order), k)
        self._exchange_counts()
        for _ in ("forward", "backward"):
            torch.index_select(self.tokens.x, 0, self.order // k, out=self.there)
            self._send()
            torch.index_select(self.here, 0, self.exchange.by_expert, out=self.by_expert)
            torch.index_select(self.by_expert, 0, self.exchange.by_source, out=self.here)
            self._return()
            embedding_bag(row_of_place, self.there, starts, mode="sum")

    def _exchange_counts(self) -> None:
        counts = torch.ones(self.tokens.num_experts, dtype=torch.int64)
        dist.all_to_all_single(torch.empty_like(counts), counts, group=self.group)

    def _send(self) -> None:
        lengths = self.exchange.from_ranks, self.exchange.to_ranks
        dist.all_to_all_single(self.here, self.there, *lengths, group=self.group)

    def _return(self) -> None:
        lengths = self.exchange.to_ranks, self.exchange.from_ranks
        dist.all_to_all_single(self.there, self.here, *lengths, group=self.group)


def _compared(tokens: Tokens, results: Mapping[str, list[Tensor] | None]) -> float:
    """Our largest error over Megatron's, or over that of the formula in the same dtype where it is not installed.

    Errors: those of `error_ratio`.
    """
    exact, plain = (
        [
            (x * gates.sum(1, keepdim=True)),
            (cotangent * gates.sum(1, keepdim=True)),
            (x * cotangent).sum(1, keepdim=True).expand(gates.shape),
        ]
        for x, gates, cotangent in (
            (tokens.x.double(), tokens.gates.double(), tokens.cotangent.double()),
            (tokens.x, tokens.gates, tokens.cotangent),
        )
    )
    ours = results[OURS]
    assert ours is not None
    return error_ratio(ours, results.get(MEGATRON) or plain, exact, "dispatch and combine")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
