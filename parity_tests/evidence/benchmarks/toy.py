"""The toy that engines are timed with: one log-probability, forward and backward, and ways for it to go wrong."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from shardproof.declare.case import CaseSpec
from torch_impl.vocab_parallel.logprob import vocab_parallel_logprob

ROWS, COLUMNS = 6, 4


def toy(mesh: Any, case: CaseSpec) -> float:
    """Log-probability of 6 tokens on 4 columns per rank, and its gradient."""
    rank = mesh.rank("tp")
    logits = torch.arange(ROWS * COLUMNS, dtype=torch.float32).cos().view(ROWS, COLUMNS).requires_grad_()
    target = torch.arange(ROWS) % (COLUMNS * mesh.size("tp"))
    out = vocab_parallel_logprob(
        logits, target, mesh["tp"], vocab_start_index=rank * COLUMNS, vocab_end_index=(rank + 1) * COLUMNS
    )
    assert isinstance(out, torch.Tensor)  # a pair with entropy only
    (gradient,) = torch.autograd.grad(out, logits, torch.ones_like(out))
    return float(gradient.sum())


def raise_on_one_rank(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") == 1:
        raise RuntimeError("injected")
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def pass_another_shape(mesh: Any, case: CaseSpec) -> None:
    dist.all_reduce(torch.ones(2 + (mesh.rank("tp") == 1)), group=mesh["tp"])


def call_another_operation(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") == 1:
        dist.broadcast(torch.ones(3), group=mesh["tp"], group_src=0)
    else:
        dist.all_reduce(torch.ones(3), group=mesh["tp"])


def skip_a_collective(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") != 1:
        dist.all_reduce(torch.ones(3), group=mesh["tp"])


def killed(mesh: Any, case: CaseSpec) -> None:
    if mesh.rank("tp") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


FAILING = {
    "raises": raise_on_one_rank,
    "other shape": pass_another_shape,
    "other operation": call_another_operation,
    "collective left out": skip_a_collective,
    "killed": killed,
}


def toy_case(world: int, engine: str) -> CaseSpec:
    return CaseSpec(scheme="toy", mesh={"tp": world}, engine=engine)
