"""One rank of the comparison with peers: the arms, each first held against its budgets, then timed in turn.

Run as `python -m parity_tests.benchmarks.arms RANK FOLDER`; no JAX is loaded here. The folder holds what the parent
drew and computed, and takes this rank's findings.
"""

from __future__ import annotations

import json
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy, log_softmax

from parity_tests.harness.engines.recorder import Recorder
from torch_impl.collectives.plain import gathered
from torch_impl.vocab_parallel.logprob import vocab_parallel_logprob

WORLD = 2
ROUNDS, WARM = 9, 2

# An arm takes (whole logits, this rank's columns of them, targets, cotangent, mesh); it returns the log-probabilities
# and the gradient of whichever logits it was differentiated by.
Arm = Callable[[Tensor, Tensor, Tensor, Tensor, DeviceMesh], tuple[Tensor, Tensor]]


def ours(whole: Tensor, own: Tensor, target: Tensor, cotangent: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    start = mesh.get_local_rank() * own.shape[-1]
    logits = own.detach().requires_grad_()
    out = vocab_parallel_logprob(
        logits, target, mesh.get_group(), vocab_start_index=start, vocab_end_index=start + own.shape[-1]
    )
    assert isinstance(out, Tensor)  # a pair with entropy only
    return out.detach(), torch.autograd.grad(out, logits, cotangent.to(out.dtype))[0]


def whole_vocabulary(
    whole: Tensor, own: Tensor, target: Tensor, cotangent: Tensor, mesh: DeviceMesh
) -> tuple[Tensor, Tensor]:
    """Every rank has all logits and does all the work."""
    logits = whole.detach().requires_grad_()
    out = log_softmax(logits.float(), -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return out.detach(), torch.autograd.grad(out, logits, cotangent.to(out.dtype))[0]


def gathered_vocabulary(
    whole: Tensor, own: Tensor, target: Tensor, cotangent: Tensor, mesh: DeviceMesh
) -> tuple[Tensor, Tensor]:
    """The same, on logits that are first gathered from the ranks."""
    joined = gathered(own, mesh.get_group(), own.ndim - 1, [own.shape[-1]] * WORLD)
    out, gradient = whole_vocabulary(joined, own, target, cotangent, mesh)
    return out, gradient.chunk(WORLD, -1)[mesh.get_local_rank()].contiguous()


def dtensor(whole: Tensor, own: Tensor, target: Tensor, cotangent: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """torch's own: a DTensor cut over the vocabulary, cross_entropy under loss_parallel."""
    local = own.detach().requires_grad_()
    with loss_parallel():
        logits = DTensor.from_local(local, mesh, [Shard(own.ndim - 1)], run_check=False)
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        out = -(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        (gradient,) = torch.autograd.grad(out, local, cotangent.to(out.dtype))
    return out.detach(), gradient


ARMS: dict[str, Arm] = {
    "ours": ours,
    "whole vocabulary on each rank": whole_vocabulary,
    "logits gathered, then whole": gathered_vocabulary,
    "DTensor loss_parallel": dtensor,
}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    with np.load(folder / "drawn.npz") as drawn:
        arrays = {name: torch.from_numpy(drawn[name]) for name in drawn.files}
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = _of_dtype(rank, mesh, arrays, dtype)
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _of_dtype(rank: int, mesh: DeviceMesh, arrays: dict[str, Tensor], dtype: str) -> dict[str, Any]:
    whole = arrays[f"{dtype} logits"].to(getattr(torch, dtype))
    given = (whole, whole.chunk(WORLD, -1)[rank].contiguous(), arrays["target"], arrays[f"{dtype} cotangent"], mesh)
    found: dict[str, Any] = {}
    for name, arm in ARMS.items():
        out, gradient = arm(*given)
        errors = {"out": (out, 0), "gradient": (gradient, rank)}
        ratios = {}
        for what, (got, part) in errors.items():
            want, budget = arrays[f"{dtype} {what}"], arrays[f"{dtype} {what} budget"]
            if got.shape != want.shape:
                want, budget = want.chunk(WORLD, -1)[part], budget.chunk(WORLD, -1)[part]
            ratios[what] = float(((got.double() - want).abs() / budget).max())
        with Recorder() as recorder:
            arm(*given)
        found[name] = {
            "ratios": ratios,
            "collectives": [row.op for row in recorder.rows],
            "bytes": sum(row.payload for row in recorder.rows),
            "seconds": [],
        }
    for turn in range(WARM + ROUNDS):
        for name, arm in ARMS.items():
            dist.barrier()
            start = time.perf_counter()
            arm(*given)
            if turn >= WARM:
                found[name]["seconds"].append(time.perf_counter() - start)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
