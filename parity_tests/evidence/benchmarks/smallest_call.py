"""The smallest log-probability, forward and backward, over plain log_softmax + gather: the cost of the checks.

Logits [2, 4, 8] in float32 on a gloo group of one, CPU time of the process. The arms are compared first, then timed in
turn. A call of any size takes this route: the time goes to Python calls and operations, not to elements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parity_tests.evidence.benchmarks.figure import Figure, spread
from torch_impl.vocab_parallel import get_next_token_logprobs_from_logits, vocab_parallel_logprob

SHAPE = (2, 4, 8)
ROUNDS, CALLS = 9, 200
LIMITS = {"smallest log-probability": 5.0, "smallest next-token log-probability": 8.0}

Arm = Callable[[], Tensor]


def figures(rounds: int = ROUNDS, calls: int = CALLS) -> Iterator[Figure]:
    """How many times the CPU time of plain torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of several, the one that is timed would wait for the others
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1) if dist.is_initialized() else None
    if group is None:
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield from _figures_of(dist.group.WORLD if group is None else group, rounds, calls)
    finally:
        torch.set_num_threads(threads)
        if group is None:
            dist.destroy_process_group()


def _figures_of(group: ProcessGroup | None, rounds: int, calls: int) -> Iterator[Figure]:
    logits = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE[:2]) * 7 % SHAPE[2]
    size = SHAPE[-1]

    def plain() -> Tensor:
        return torch.log_softmax(logits, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    def logprob() -> Tensor:
        return vocab_parallel_logprob(logits, ids, group, vocab_start_index=0, vocab_end_index=size)  # pyright: ignore

    def next_token() -> Tensor:
        return get_next_token_logprobs_from_logits(ids, logits, vocab_parallel_rank=0, vocab_parallel_group=group)

    if not torch.equal((logprob() - plain()).abs() < 1e-5, torch.ones(SHAPE[:2], dtype=torch.bool)):
        raise RuntimeError("benchmarks: two log-probabilities differ; they are not timed")
    arms: dict[str, Arm] = dict(zip(LIMITS, (logprob, next_token), strict=True))
    seconds = {name: [] for name in ("plain", *arms)}
    for _ in range(rounds):
        for name, arm in (("plain", plain), *arms.items()):
            seconds[name].append(_seconds(arm, logits, calls))
    setting = f"logits {list(SHAPE)}, float32, gloo group of one, {rounds} rounds of {calls} calls"
    how = f"{setting}; median (least to greatest)"
    for name, limit in LIMITS.items():
        ratios = [ours / plain for ours, plain in zip(seconds[name], seconds["plain"], strict=True)]
        micros = spread([1e6 * each for each in seconds[name]])
        measured = f"{spread(ratios)} times; {micros} us"
        promised = f"<= {limit:.0f} times log_softmax + gather"
        yield Figure(f"{name} over log_softmax + gather", promised, measured, sorted(ratios)[rounds // 2] <= limit, how)


def _seconds(arm: Arm, logits: Tensor, calls: int) -> float:
    """CPU seconds of one forward and backward."""
    cotangent = torch.ones_like(arm())
    start = time.process_time()
    for _ in range(calls):
        torch.autograd.backward(arm(), cotangent)
        logits.grad = None
    return (time.process_time() - start) / calls
