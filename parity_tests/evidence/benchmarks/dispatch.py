"""Dispatch and combine over gloo processes beside their bare messages and Megatron-core's: CPU time of all ranks.

Run as `python -m parity_tests.evidence.benchmarks.dispatch RANK WORLD FOLDER` it is one rank; no JAX is loaded there.
Experts return their rows as they are, so an arm times only the work around the experts; its output and its
gradients of tokens and of gates are compared first.
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

from parity_tests.evidence.benchmarks.accuracy import error_ratio
from parity_tests.evidence.benchmarks.figure import Figure, spread
from parity_tests.evidence.benchmarks.operations import costliest
from parity_tests.evidence.benchmarks.peer_arms import missing
from parity_tests.evidence.benchmarks.ranks import run_ranks
from torch_impl.collectives.plain import all_to_all_equal
from torch_impl.expert_parallel.dispatch import destinations, messages_of, sorted_choices

WORLD = 4
ROUNDS, WARM = 9, 2
PROMISED = 1.3
WIRE, OWN, OURS, MEGATRON = "wire", "own messages", "ours", "megatron-core"
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
    """Our time over that of bare messages and of Megatron-core, in each dtype; then with the default allocation."""
    for dtype in ("float32", "bfloat16"):
        yield from figures_of(Sizes(), dtype, WORLD, rounds, keeps_pages=True)
    yield from figures_of(Sizes(), "float32", WORLD, rounds, keeps_pages=False)


def figures_of(sizes: Sizes, dtype: str, world: int, rounds: int, keeps_pages: bool) -> Iterator[Figure]:
    """Run the ranks, compare, and time all arms in turn. Errors: RuntimeError if a rank fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sizes.json").write_text(json.dumps({"sizes": asdict(sizes), "dtype": dtype, "rounds": rounds}))
        settings = ["env", *KEEPS_PAGES] if keeps_pages else []
        command = [*settings, sys.executable, "-m", "parity_tests.evidence.benchmarks.dispatch"]
        by_rank = run_ranks(command, world, folder, str(world), topic="dispatch", seconds=600)
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
        where = _beside_megatron(by_rank[0]) if over == MEGATRON else _explain_times(totals, by_rank[0])
        yield Figure(title, promised, _describe(totals, over, ratio), is_met, f"{how}; {where}")


def _describe(totals: Mapping[str, list[float]], over: str, ratio: float) -> str:
    rounds = [ours / other for ours, other in zip(totals[OURS], totals[over], strict=True)]
    ours, other = (spread([1e3 * seconds for seconds in totals[name]]) for name in (OURS, over))
    return f"{ratio:.3g} times, by round {spread(rounds)}; {ours} ms beside {other} ms"


def _explain_times(totals: Mapping[str, list[float]], rank: Mapping[str, Any]) -> str:
    """What the wire is, which messages ours sends instead, and where our time goes."""
    wire, own, ours = (_median(totals[name]) for name in (WIRE, OWN, OURS))
    return (
        "the wire is bare all_to_alls with a row for each choice, there and back, between allocated buffers; ours "
        f"sends a row once to each rank of a token: these messages alone take {own / wire:.3g} times the wire, and "
        f"all of ours takes {ours / own:.3g} times these messages; ours: {rank['operations']}"
    )


def _beside_megatron(rank: Mapping[str, Any]) -> str:
    return f"MoEAlltoAllTokenDispatcher; error {rank['error']:.2g} times its own"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    group = dist.new_group(list(range(world)))
    setting = json.loads((folder / "sizes.json").read_text())
    tokens = _draw_tokens(Sizes(**setting["sizes"]), rank, world, getattr(torch, setting["dtype"]))
    arms: dict[str, Callable[[], list[Tensor] | None]] = {
        WIRE: Wire.of(tokens, group, kind=1).messages,
        OWN: Wire.of(tokens, group, kind=0).messages,
        OURS: lambda: tokens.differentiated(lambda x, gates: our_layer(tokens, x, gates, group)),
    }
    reason = missing(MEGATRON)
    if reason is None:
        from parity_tests.evidence.benchmarks.megatron_dispatcher import megatron_layer

        layer = megatron_layer(tokens.num_experts, tokens.experts, tokens.x.shape[1], group)
        arms[MEGATRON] = lambda: tokens.differentiated(lambda x, gates: Combined(*layer(x, gates)))
    figures: dict[str, Any] = {"missing": reason, "seconds": {name: [] for name in arms}}
    figures["error"] = _compare(tokens, {name: arm() for name, arm in arms.items() if name not in (WIRE, OWN)})
    for turn in range(WARM + setting["rounds"]):
        for name, arm in arms.items():
            dist.barrier(group)
            start = time.process_time()  # includes the threads that send messages
            arm()
            if turn >= WARM:
                figures["seconds"][name].append(time.process_time() - start)
    figures["operations"] = costliest(arms[OURS])
    (folder / f"found_{rank}.json").write_text(json.dumps(figures))
    dist.barrier(group)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Combined:
    """The layer's output, the rows that reached their experts and left them unchanged, and the gates of these rows."""

    y: Tensor
    rows: Tensor
    gates_of_rows: Tensor


@dataclass(frozen=True)
class Tokens:
    """This rank's tokens, their choices, and the cotangent of the layer's output."""

    x: Tensor
    gates: Tensor
    experts: Tensor
    cotangent: Tensor
    num_experts: int

    def differentiated(self, layer: Callable[[Tensor, Tensor], Combined]) -> list[Tensor]:
        """Output, and the gradients of tokens and gates.

        In the layer experts multiply by the gates. There are no experts here, so the cotangent of a gate is the first
        number of its row.
        """
        x, gates = self.x.detach().requires_grad_(), self.gates.detach().requires_grad_()
        combined = layer(x, gates)
        outputs = combined.y, combined.gates_of_rows
        of_gates = combined.rows.detach()[:, 0].to(combined.gates_of_rows.dtype)
        return [combined.y.detach(), *torch.autograd.grad(outputs, (x, gates), (self.cotangent, of_gates))]


def _draw_tokens(sizes: Sizes, rank: int, world: int, dtype: torch.dtype) -> Tokens:
    generator = torch.Generator().manual_seed(rank)
    shape = sizes.tokens // world, sizes.d
    x, cotangent = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    probabilities = torch.randn(shape[0], sizes.experts, generator=generator).softmax(-1)
    gates, experts = probabilities.topk(sizes.k)
    return Tokens(x, gates.to(dtype), experts, cotangent, sizes.experts)


def our_layer(tokens: Tokens, x: Tensor, gates: Tensor, group: ProcessGroup) -> Combined:
    """The lines of `routed_experts`, without the experts' own computation."""
    targets, counts = destinations(tokens.experts, group.size(), tokens.num_experts // group.size())
    messages = messages_of(counts, group, None)
    targets = targets.first(sum(messages.to_ranks))
    x_here, gates_here, chosen = (
        messages.dispatched(targets.rows(each), group, None) for each in (x, gates, tokens.experts.int())
    )
    local = tokens.num_experts // group.size()
    choices = sorted_choices(chosen, local, first=group.rank() * local).first(messages.choices)
    rows, gates_of_rows = choices.rows(x_here), gates_here.flatten().index_select(0, choices.order)
    sums = choices.sums(rows)
    return Combined(targets.sums(messages.returned(sums, group, None)), rows, gates_of_rows)


@dataclass(frozen=True)
class Wire:
    """The bare messages of a layer, there and back, between buffers that are allocated beforehand."""

    there: Tensor
    here: Tensor
    to_ranks: list[int]
    from_ranks: list[int]
    group: ProcessGroup

    @staticmethod
    def of(tokens: Tokens, group: ProcessGroup, kind: int) -> Wire:
        """The messages with a row for each rank that a token goes to (kind 0), or for each of its choices (kind 1)."""
        _, counts = destinations(tokens.experts, group.size(), tokens.num_experts // group.size())
        sent = counts[:, kind].contiguous()
        to_ranks, from_ranks = sent.tolist(), all_to_all_equal(sent, group).tolist()
        there, here = (tokens.x.new_ones(sum(lengths), tokens.x.shape[1]) for lengths in (to_ranks, from_ranks))
        return Wire(there, here, to_ranks, from_ranks, group)

    def messages(self) -> None:
        """Rows there and back, forward and backward."""
        for _ in ("forward", "backward"):
            dist.all_to_all_single(self.here, self.there, self.from_ranks, self.to_ranks, group=self.group)
            dist.all_to_all_single(self.there, self.here, self.to_ranks, self.from_ranks, group=self.group)


def _compare(tokens: Tokens, results: Mapping[str, list[Tensor] | None]) -> float:
    """Our largest error over Megatron's, or, if it is not installed, over the formula's in the same dtype.

    Errors: as `error_ratio`.
    """
    exact, plain = (
        [
            x * gates.shape[1],
            cotangent * gates.shape[1],
            x[:, :1].expand(gates.shape),
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
