"""The Triton kernels on a GPU, beside a copy of as many bytes: the fraction of the memory's speed that they reach.

One read of the logits forward, one read and one write backward: half a copy and a copy. Our arms are first held
against their budgets, then all are timed in turn, so that the clocks of the GPU meet them alike. CALLS calls are queued
at a time, as in a training step. Time beyond the statistics' and the gradient's is the GPU waiting for the CPU, which
queues some twenty small operations. A call alone, until the GPU is done, is a figure of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parity_tests.evidence.benchmarks.figure import Figure, spread
from torch_impl.vocab_parallel import fused_logprob
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.fused_logprob import id_cotangents

ROWS, COLUMNS = 4096, 131072  # 1 GiB in bfloat16
ROUNDS, WARM, CALLS = 21, 3, 8
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
    """`copies`: the bytes it must read and write, in copies of the logits."""

    job: Callable[[], Any]
    copies: float


def figures() -> Iterator[Figure]:
    """Measured where there is CUDA; where not, every promise is named and said to be not run."""
    if torch.cuda.is_available():
        yield from measured(torch.device("cuda"), ROWS, COLUMNS, BACKENDS, ROUNDS)
        return
    for name, promised in PROMISES.items():
        yield Figure(name, promised, NOT_RUN, None, f"{ROWS} x {COLUMNS} bfloat16 on one GPU")


def measured(device: torch.device, rows: int, columns: int, backends: tuple[str, ...], rounds: int) -> Iterator[Figure]:
    """The figures of one device; the first backend is the one that promises are about."""
    logits, first = _logits(device, rows, columns), backends[0]
    check(logits, backends)
    arms = arms_of(logits, backends)
    seconds = in_turn(arms, device, rounds, CALLS)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    how = f"{rows} x {columns} bfloat16 on {name}, {rounds} rounds of {CALLS} calls in turn; median (least to greatest)"
    copied = 2 * logits.nbytes / min(seconds["copy"]) / 1e9
    yield Figure("copy of the logits", "-", f"{spread([1e3 * s for s in seconds['copy']])} ms", None, how)
    for arm, times in seconds.items():
        if arm != "copy":
            fractions = [arms[arm].copies * a / b for a, b in zip(seconds["copy"], times, strict=True)]
            text = f"{spread(fractions)} of the copy bound; {spread([1e3 * s for s in times])} ms"
            promised = PROMISES.get(arm)
            is_kept = sorted(fractions)[rounds // 2] >= PROMISED_FRACTION if promised else None
            yield Figure(arm, promised or "-", text, is_kept, f"{how}; a copy moves {copied:.0f} GB/s at best")
    pairs = zip(seconds[f"logprob and entropy, {first}"], seconds[_both(first)], strict=True)
    ratios = [with_entropy / alone for with_entropy, alone in pairs]
    is_kept = sorted(ratios)[rounds // 2] <= PROMISED_ENTROPY
    title = "logprob with entropy over logprob alone"
    yield Figure(title, PROMISES[title], spread(ratios), is_kept, how)
    alone = in_turn({first: arms[_both(first)]}, device, rounds)[first]
    yield Figure(
        f"a call alone, {first}",
        "-",
        f"{spread([1e3 * s for s in alone])} ms",
        None,
        f"{_both(first)}, until the GPU is done",
    )
    if device.type == "cuda":
        yield from memory(logits, first)


def memory(logits: Tensor, backend: str) -> Iterator[Figure]:
    """The allocator's peak above the memory that was in use before, in units of the logits."""
    for name, promised in PROMISED_MEMORY.items():
        is_in_place = name == "in place"
        extra = _extra_memory(logits, partial(logprob_and_gradient, backend=backend, inplace_gradient=is_in_place))
        title = f"extra memory, gradient {name}"
        yield Figure(title, PROMISES[title], f"{extra:.3f}", extra <= promised, f"peak of the allocator, {backend}")
    for name, job in peer_jobs().items():
        yield Figure(f"extra memory, {name}", "-", f"{_extra_memory(logits, job):.3f}", None, "peak of the allocator")


def _extra_memory(logits: Tensor, job: Callable[[Tensor], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    job(logits.clone())
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / logits.nbytes - 1.0


def peer_jobs() -> dict[str, Callable[[Tensor], Tensor]]:
    """The gradient by other libraries' functions, if installed; liger-kernel's is written over the logits."""
    jobs: dict[str, Callable[[Tensor], Tensor]] = {
        "cross_entropy": partial(_gradient_of, loss=_cross_entropy),
        "cross_entropy, compiled": partial(_gradient_of, loss=lambda *inputs: _compiled_cross_entropy()(*inputs)),
    }
    if find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        jobs["liger-kernel"] = partial(_gradient_of, loss=LigerCrossEntropyLoss(reduction="none"))
    return jobs


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, reduction="none")


@functools.cache
def _compiled_cross_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_cross_entropy)


def _gradient_of(logits: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    z, target, ones = logits.detach().requires_grad_(), *_target(logits.device, *logits.shape)
    return torch.autograd.grad(loss(z, target), z, ones)[0]


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
    if logits.is_cuda:
        arms |= {name: Arm(partial(job, over), 1.5) for name, job in peer_jobs().items()}
    return arms


def check(logits: Tensor, backends: tuple[str, ...]) -> None:
    """Compare some rows of every backend with the eager twin in float64. Errors: RuntimeError if one is too far off."""
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


def in_turn(arms: Mapping[str, Arm], device: torch.device, rounds: int, calls: int = 1) -> dict[str, list[float]]:
    """Seconds of every arm in every round, after some rounds to compile and warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(WARM + rounds):
        for name, arm in arms.items():
            elapsed = _seconds(arm.job, device, calls)
            if turn >= WARM:
                seconds[name].append(elapsed)
    return seconds


def _seconds(job: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Of one of so many calls, queued on a GPU that has nothing else to do."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            job()
        return (time.perf_counter() - start) / calls
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    before.record()
    for _ in range(calls):
        job()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3 / calls


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
    z, target, ones = logits.detach().requires_grad_(), *_target(logits.device, *logits.shape)
    outputs = _WholeRows.apply(z, target, plan)
    return torch.autograd.grad(outputs, z, [ones] * len(outputs))[0]


def _logits(device: torch.device, rows: int, columns: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)


@functools.cache
def _target(device: torch.device, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """An id of each row, and its cotangent."""
    return torch.arange(rows, device=device) * 7919 % columns, torch.ones(rows, device=device)


def _kernel_inputs(logits: Tensor) -> tuple[Tensor, Any, tuple[Tensor, Tensor]]:
    """(columns, their cotangents, m and log(1 + R))."""
    column = st.local_column(_target(logits.device, *logits.shape)[0].unsqueeze(-1), 0, logits.shape[-1])
    row_max = logits.amax(-1).float()
    log_row_sum = torch.stack([(row.float() - m).exp().sum().log() for row, m in zip(logits, row_max, strict=True)])
    return column, id_cotangents(column, torch.ones(column.shape, device=logits.device)), (row_max, log_row_sum)


def _both(backend: str) -> str:
    return f"logprob forward and backward, {backend}"
