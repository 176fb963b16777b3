"""One rank of the comparison with peers: compares each arm with its budgets, then times the arms in turn.

Run as `python -m parity_tests.evidence.benchmarks.arms RANK FOLDER`; no JAX is loaded here. The folder holds the
parent's inputs and references, and takes this rank's findings. Budgets are for the parent's sizes. The timed inputs are
larger than a reference in float64 can be, and are drawn here.
"""

from __future__ import annotations

import json
import math
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

from parity_tests.evidence.benchmarks.operations import costliest
from parity_tests.evidence.benchmarks.passes import ALONE, NEW_MEMORY
from parity_tests.evidence.benchmarks.peer_arms import COMPILED, HEAD, LOGPROB, Arm, ArmInputs, missing
from shardproof.engines.live_peak import LivePeak
from shardproof.engines.processes.recorder import Recorder

WORLD = 2
DTYPES = ("float32", "bfloat16")
ROUNDS, WARM = 7, 2
BOUND = "bound"
# Timed sizes: tokens, vocabulary, and the width of hidden states.
TIMED = {"logprob": {"s": 512, "v": 131072}, "head": {"s": 512, "v": 65536, "d": 1024}}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    figures: dict[str, Any] = {}
    for topic, arms in (("logprob", LOGPROB), ("head", HEAD)):
        for dtype in DTYPES:
            reason = _not_timed(topic, dtype)
            if reason:
                figures[f"{topic} {dtype}"] = {name: {"missing": reason} for name in (BOUND, *arms)}
                continue
            with np.load(folder / f"{topic}_{dtype}.npz") as archive:
                arrays = {name: torch.from_numpy(archive[name]) for name in archive.files}
            inputs = _inputs(rank, mesh, arrays, getattr(torch, dtype))
            timed = _inputs(rank, mesh, _drawn(**TIMED[topic]), getattr(torch, dtype))
            figures[f"{topic} {dtype}"] = _compared(rank, arrays, arms, inputs, timed)
    (folder / f"found_{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def _not_timed(topic: str, dtype: str) -> str | None:
    """The reason why the arms of this topic are not timed in this dtype on this CPU; None if they are.

    Without AVX-512, torch multiplies bfloat16 matrices at 0.4 GFLOP/s in a backward, 50 times slower than in float32: a
    round of the arms takes half an hour, and compares torch's fallback with itself.
    """
    if topic == "head" and dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "not run: this CPU has no fast product of bfloat16 matrices"
    return None


def _drawn(s: int, v: int, d: int | None = None) -> dict[str, Tensor]:
    """Targets and cotangents of all tokens, with logits, or with hidden states and a weight if d is given."""
    generator = torch.Generator().manual_seed(0)
    arrays = {"target": torch.randint(v, (1, s), generator=generator)}
    arrays["cotangent"] = torch.randn(1, s, generator=generator)
    if d is None:
        return arrays | {"logits": torch.randn(1, s, v, generator=generator)}
    weight = torch.randn(v, d, generator=generator) * d**-0.5
    return arrays | {"hidden": torch.randn(s, 1, d, generator=generator), "weight": weight}


def _inputs(rank: int, mesh: DeviceMesh, arrays: dict[str, Tensor], dtype: torch.dtype) -> ArmInputs:
    """The inputs of one rank, which has columns of the logits or rows of the weight."""
    has_head = "weight" in arrays
    full = arrays["weight" if has_head else "logits"].to(dtype)
    local = full.chunk(WORLD, 0 if has_head else -1)[rank].contiguous()
    hidden = arrays["hidden"].to(dtype) if has_head else full[:0]
    return ArmInputs(full, local, arrays["target"], arrays["cotangent"], mesh, hidden)


def _compared(
    rank: int, arrays: dict[str, Tensor], arms: dict[str, Arm], inputs: ArmInputs, timed: ArmInputs
) -> dict[str, Any]:
    reasons = {name: missing(name) for name in arms}
    results: dict[str, Any] = {name: {"missing": reason} for name, reason in reasons.items() if reason}
    running = {name: arm for name, arm in arms.items() if not reasons[name]}
    for name, arm in running.items():
        results[name] = {"ratio": _worst(arm(_fresh(inputs)), arrays, rank)}
        if name not in COMPILED:
            results[name] |= _traffic_and_memory(arm, inputs)
        if name.startswith("ours"):
            fresh = _fresh(timed)
            results[name]["operations"] = costliest(lambda arm=arm, fresh=fresh: arm(fresh))
    jobs: dict[str, Callable[[ArmInputs], Any]] = {BOUND: _bound(timed), **_alone(timed), **running}
    times = {name: {"wall": [], "cpu": []} for name in jobs}
    for turn in range(WARM + ROUNDS):
        for name, job in jobs.items():
            fresh = _fresh(timed)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            job(fresh)
            seconds = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= WARM:
                times[name]["wall"].append(seconds[0])
                times[name]["cpu"].append(seconds[1])
    return {name: {**results.get(name, {}), **times.get(name, {})} for name in (*jobs, *results)}


def _fresh(inputs: ArmInputs) -> ArmInputs:
    """Copies of the tensors that an arm may overwrite, made outside of its time."""
    return ArmInputs(
        inputs.full, inputs.shard.clone(), inputs.target, inputs.cotangent, inputs.mesh, inputs.hidden.clone()
    )


def _worst(results: list[Tensor], arrays: dict[str, Tensor], rank: int) -> float:
    """The worst error of an arm's results, in budgets of the reference. Errors: RuntimeError if it is NaN."""
    ratios = []
    for i, got in enumerate(results):
        want, budget = arrays[f"want {i}"], arrays[f"budget {i}"]
        for dim in range(got.ndim):
            if got.shape[dim] != want.shape[dim]:
                want, budget = (x.chunk(WORLD, dim)[rank] for x in (want, budget))
        error = (got.detach().double() - want).abs()
        ratios.append(torch.where(error == 0, 0.0, error / budget).max())
    worst = float(torch.stack(ratios).max())  # torch's maximum: NaN if one is NaN
    if math.isnan(worst):
        raise RuntimeError("benchmarks: an arm's result is not a number, so the arm is not timed")
    return worst


def _traffic_and_memory(arm: Arm, inputs: ArmInputs) -> dict[str, Any]:
    """Collectives and bytes of one run, the most live memory of another, and the size of this rank's part."""
    recorded, measured = _fresh(inputs), _fresh(inputs)
    with Recorder() as recorder:
        arm(recorded)
    with LivePeak() as peak:
        arm(measured)
    return {
        "collectives": [row.op for row in recorder.rows],
        "bytes": sum(row.payload for row in recorder.rows),
        "memory": peak.most,
        "part": inputs.shard.nbytes,
    }


def _alone(inputs: ArmInputs) -> dict[str, Callable[[ArmInputs], Any]]:
    """The experiments; a head is measured with new memory only."""
    return {NEW_MEMORY: ALONE[NEW_MEMORY]} if inputs.hidden.numel() else ALONE


def _bound(inputs: ArmInputs) -> Callable[[ArmInputs], Any]:
    """The least work of any implementation: one and a half copies of the logits, or four products of a head."""
    if not inputs.hidden.numel():
        into = torch.empty_like(inputs.shard)
        half = inputs.shard.flatten()[: inputs.shard.numel() // 2]
        return lambda fresh: (into.copy_(fresh.shard), into.view(-1)[: len(half)].copy_(half))
    states = inputs.hidden.flatten(0, 1)
    logits = states @ inputs.shard.T
    return lambda fresh: (states @ inputs.shard.T, states @ inputs.shard.T, logits @ inputs.shard, logits.T @ states)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
