"""The Triton kernels on a GPU, beside the copy of as many bytes: what fraction of the memory's speed they reach.

One read of the logits forward, one read and one write backward: half a copy and a copy. The arms are first held
against their budgets, then timed in turn, so that the clocks of the GPU meet all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity_tests.benchmarks.figure import Figure, spread
from torch_impl.kernels import rows_at
from torch_impl.layouts import dual_chunk_swap
from torch_impl.vocab_parallel import fused_logprob
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.fused_logprob import id_cotangents

ROWS, COLUMNS = 4096, 131072  # 1 GiB in bfloat16
ROUNDS, WARM = 21, 3
NOT_RUN = "not run: needs CUDA"
BACKENDS = ("triton", "compile", "eager")
PROMISED_FRACTION, PROMISED_ENTROPY, PROMISED_MEMORY = 0.85, 1.15, {"apart": 1.05, "in place": 0.05}
PROMISES = {
    "logprob forward and backward, triton": f">= {PROMISED_FRACTION:.0%} of the copy bound on one H100",
    "logprob with entropy over logprob alone": f"<= {PROMISED_ENTROPY}",
    "extra memory, gradient apart": f"<= {PROMISED_MEMORY['apart']} of the logits",
    "extra memory, gradient in place": f"<= {PROMISED_MEMORY['in place']} of the logits",
}


@dataclass(frozen=True)
class Arm:
    """`copies`: what it must read and write, in copies of the logits."""

    job: Callable[[], Any]
    copies: float


def figures() -> Iterator[Figure]:
    """Measured where there is CUDA; where not, every promise is named and said to be not run."""
    if torch.cuda.is_available():
        yield from measured(torch.device("cuda"), ROWS, COLUMNS, BACKENDS, ROUNDS)
        return
    for name, promised in PROMISES.items():
        yield Figure(name, promised, NOT_RUN, None, f"{ROWS} x {COLUMNS} bfloat16 on one GPU; not yet measured")


def measured(device: torch.device, rows: int, columns: int, backends: tuple[str, ...], rounds: int) -> Iterator[Figure]:
    """The figures of one device; the first backend is the one that promises are about."""
    logits = _logits(device, rows, columns)
    check(logits, backends)
    arms = arms_of(logits, backends)
    seconds = in_turn(arms, device, rounds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    how = f"{rows} x {columns} bfloat16 on {name}, {rounds} rounds in turn; median (least to greatest)"
    copied = 2 * logits.nbytes / min(seconds["copy"]) / 1e9
    yield Figure("copy of the logits", "-", f"{spread([1e3 * s for s in seconds['copy']])} ms", None, how)
    for arm, times in seconds.items():
        if arm != "copy":
            fractions = [arms[arm].copies * a / b for a, b in zip(seconds["copy"], times, strict=True)]
            text = f"{spread(fractions)} of the copy bound; {spread([1e3 * s for s in times])} ms"
            promised = PROMISES.get(arm)
            is_kept = sorted(fractions)[rounds // 2] >= PROMISED_FRACTION if promised else None
            yield Figure(arm, promised or "-", text, is_kept, f"{how}; a copy moves {copied:.0f} GB/s at best")
    first = backends[0]
    pairs = zip(seconds[f"logprob and entropy, {first}"], seconds[_both(first)], strict=True)
    ratios = [with_entropy / alone for with_entropy, alone in pairs]
    is_kept = sorted(ratios)[rounds // 2] <= PROMISED_ENTROPY
    title = "logprob with entropy over logprob alone"
    yield Figure(title, PROMISES[title], spread(ratios), is_kept, how)
    if device.type == "cuda":
        yield from memory(logits, first)


def memory(logits: Tensor, backend: str) -> Iterator[Figure]:
    """The allocator's peak above what was there, in units of the logits."""
    for name, promised in PROMISED_MEMORY.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        local = logits.clone()
        logprob_and_gradient(local, backend, inplace_gradient=name == "in place")
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before) / logits.nbytes - 1.0
        title = f"extra memory, gradient {name}"
        yield Figure(title, PROMISES[title], f"{extra:.3f}", extra <= promised, f"peak of the allocator, {backend}")


def arms_of(logits: Tensor, backends: tuple[str, ...]) -> dict[str, Arm]:
    into, over = torch.empty_like(logits), logits.clone()
    arms = {"copy": Arm(lambda: into.copy_(logits), 1.0)}
    for backend in backends:
        arms[_both(backend)] = Arm(partial(logprob_and_gradient, logits, backend), 1.5)
    first = backends[0]
    arms[f"logprob and entropy, {first}"] = Arm(partial(logprob_and_gradient, logits, first, with_entropy=True), 1.5)
    arms[f"logprob, gradient in place, {first}"] = Arm(
        partial(logprob_and_gradient, over, first, inplace_gradient=True), 1.5
    )
    column, at_ids, statistics = _kernel_inputs(logits)
    for backend in backends:
        local = fused_logprob.implementation_of(st.local_statistics, backend)
        write = fused_logprob.implementation_of(fused_logprob.write_gradient, backend)
        arms[f"statistics, {backend}"] = Arm(partial(local, logits, column, 1.0, False), 0.5)
        arms[f"gradient, {backend}"] = Arm(
            partial(write, into, logits, st.Normaliser(*statistics), at_ids, None, 1.0, True), 1.0
        )
    order = torch.cat(dual_chunk_swap(len(logits), 2, device=logits.device))
    for backend in backends:
        arms[f"rows in DualChunkSwap order, {backend}"] = Arm(partial(rows_at, logits, order, backend=backend), 1.0)
    return arms


def check(logits: Tensor, backends: tuple[str, ...]) -> None:
    """Some rows of every backend against the eager twin in float64. Errors: RuntimeError for what must not be timed."""
    from parity_tests.kernels.twin import worst_ratio

    some = logits[:4]
    column, at_ids, statistics = _kernel_inputs(some)

    def sums(x: Tensor) -> Tensor:
        return st.local_statistics(x, None, 1.0, True)[1:]

    def gradient(x: Tensor, g: Tensor, *rest: Tensor) -> Tensor:
        out = torch.empty_like(x)
        gradient_at_ids = id_cotangents(column.to(x.device), g)
        fused_logprob.write_gradient(out, x, st.Normaliser(*rest), gradient_at_ids, None, 1.0, True)
        return out

    for backend in backends:
        computed = fused_logprob.implementation_of(st.local_statistics, backend)(some, None, 1.0, True)[1:]
        out = torch.empty(some.shape, device=some.device)
        fused_logprob.implementation_of(fused_logprob.write_gradient, backend)(
            out, some, st.Normaliser(*statistics), at_ids, None, 1.0, True
        )
        worst = max(
            worst_ratio(computed, sums, (some,), some.shape[-1]),
            worst_ratio(out, gradient, (some, at_ids.g_same, *statistics), 1),
        )
        if not worst <= 1:
            raise RuntimeError(f"benchmarks: {backend} is {worst:.2g} budgets off its twin; it is not timed")


def in_turn(arms: Mapping[str, Arm], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm in every round, after some rounds to compile and warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(WARM + rounds):
        for name, arm in arms.items():
            elapsed = _seconds(arm.job, device)
            if turn >= WARM:
                seconds[name].append(elapsed)
    return seconds


def _seconds(job: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        job()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    before.record()
    job()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


class _WholeRows(torch.autograd.Function):
    """Log-probability of rows that are whole on this device: no group, no collective."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, plan: fused_logprob.LogprobOptions) -> tuple[Tensor, ...]:
        return fused_logprob.forward(ctx, logits, target, plan)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return fused_logprob.backward(ctx, *cotangents), None, None


def logprob_and_gradient(logits: Tensor, backend: str, **options: bool) -> Tensor:
    plan = fused_logprob.LogprobOptions(None, 0, logits.shape[-1], backend=backend, **options)
    z = logits.detach().requires_grad_()
    outputs = _WholeRows.apply(z, _target(logits), plan)
    return torch.autograd.grad(outputs, z, [torch.ones_like(output) for output in outputs])[0]


def _logits(device: torch.device, rows: int, columns: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)


def _target(logits: Tensor) -> Tensor:
    return torch.arange(len(logits), device=logits.device) * 7919 % logits.shape[-1]


def _kernel_inputs(logits: Tensor) -> tuple[Tensor, Any, tuple[Tensor, Tensor]]:
    """(columns, their cotangents, m and log(1 + R))."""
    column = st.local_column(_target(logits).unsqueeze(-1), 0, logits.shape[-1])
    row_max = logits.amax(-1).float()
    log_row_sum = torch.stack([(row.float() - m).exp().sum().log() for row, m in zip(logits, row_max, strict=True)])
    return column, id_cotangents(column, torch.ones(column.shape, device=logits.device)), (row_max, log_row_sum)


def _both(backend: str) -> str:
    return f"logprob forward and backward, {backend}"
