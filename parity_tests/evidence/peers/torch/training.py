"""A training step: the gradients that FSDP2 and DDP accumulate in .grad over micro-batches, and their clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from parity_tests.evidence.peers.torch.shards import sharded
from shardproof import scheme, values

MICRO_BATCHES = 2
NORMAL = values("normal")


class Net(nn.Module):
    """Two linear layers with the given weights."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        with torch.device("meta"):  # where nothing is drawn
            self.up = nn.Linear(up.shape[1], up.shape[0], bias=False)
            self.down = nn.Linear(down.shape[1], down.shape[0], bias=False)
        self.up.weight, self.down.weight = (
            nn.Parameter(weight.clone(memory_format=torch.contiguous_format)) for weight in (up, down)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


def gradients(x: Any, up: Any, down: Any) -> tuple[Any, Any]:
    """The gradients of the mean square of the net's output over all rows."""

    def loss(up: Any, down: Any) -> Any:
        return ((jax.nn.silu(x @ up.T) @ down.T) ** 2).mean()

    return jax.grad(loss, (0, 1))(up, down)


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _accumulate(model: nn.Module, x: torch.Tensor, last_only: Callable[[bool], Any]) -> tuple[torch.Tensor, ...]:
    """Run one backward per micro-batch inside `last_only(is_last)`, which may delay the ranks' sum to the last one."""
    parts = x.chunk(MICRO_BATCHES)
    for place, part in enumerate(parts):
        with last_only(place == len(parts) - 1):
            ((model(part) ** 2).mean() / len(parts)).backward()
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return _whole(inner.up.weight.grad), _whole(inner.down.weight.grad)


def _fsdp(mesh: Any, up: torch.Tensor, down: torch.Tensor) -> nn.Module:
    model = Net(up, down)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh.device_mesh)
    return fully_shard(model, mesh=mesh.device_mesh)


STEP = dict(
    reference=gradients,
    inputs={"x": "b/dp d", "up": "f d", "down": "d f"},
    outputs=("f d dp=I", "d f dp=I"),
    mesh={"dp": (1, 2, 4)},
    dims={"b": (16, 24)},
    nograd=("x", "up", "down"),
    draw={"x": NORMAL, "up": NORMAL, "down": NORMAL},
    dtypes=("float32",),
    roundings=4,
    reduction=("b", "d", "f"),
)


@scheme(**STEP)
def fsdp2_sums_at_each_micro_batch(mesh: Any, x: Any, up: Any, down: Any) -> Any:
    return _accumulate(_fsdp(mesh, up, down), x, lambda last: nullcontext())


@scheme(**STEP)
def fsdp2_sums_at_the_last_micro_batch(mesh: Any, x: Any, up: Any, down: Any) -> Any:
    model = _fsdp(mesh, up, down)

    def last_only(is_last: bool) -> Any:
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    return _accumulate(model, x, last_only)


@scheme(**STEP)
def fsdp2_keeps_parameters_after_forward(mesh: Any, x: Any, up: Any, down: Any) -> Any:
    return _accumulate(
        fully_shard(Net(up, down), mesh=mesh.device_mesh, reshard_after_forward=False), x, lambda last: nullcontext()
    )


@scheme(**STEP)
def ddp_sums_at_each_micro_batch(mesh: Any, x: Any, up: Any, down: Any) -> Any:
    model = DistributedDataParallel(Net(up, down), process_group=mesh["dp"])
    return _accumulate(model, x, lambda last: nullcontext())


@scheme(**STEP)
def ddp_sums_at_the_last_micro_batch(mesh: Any, x: Any, up: Any, down: Any) -> Any:
    model = DistributedDataParallel(Net(up, down), process_group=mesh["dp"])
    return _accumulate(model, x, lambda last: nullcontext() if last else model.no_sync())


@scheme(**STEP)
def ddp_gradients_as_views_of_buckets(mesh: Any, x: Any, up: Any, down: Any) -> Any:
    model = DistributedDataParallel(Net(up, down), process_group=mesh["dp"], gradient_as_bucket_view=True)
    return _accumulate(model, x, lambda last: nullcontext())


@scheme(
    **STEP
    | dict(
        inputs={"x": "b/dp_replicate/dp_shard d", "up": "f d", "down": "d f"},
        outputs=("f d dp_replicate=I dp_shard=I", "d f dp_replicate=I dp_shard=I"),
        mesh={"dp_replicate": (1, 2), "dp_shard": (1, 2)},
    )
)
def fsdp2_hybrid(mesh: Any, x: Any, up: Any, down: Any) -> Any:
    model = Net(up, down)
    return _accumulate(fully_shard(model, mesh=mesh.device_mesh), x, lambda last: nullcontext())


# Clipping: the gradients come from outside, as a backward left them.


def clip_reference(a: Any, b: Any, most: float, kind: float) -> tuple[Any, ...]:
    """Two gradients, scaled down if their joint norm exceeds `most`, and this norm before scaling."""
    every = jnp.abs(jnp.concatenate([a.reshape(-1), b.reshape(-1)]))
    norm = every.max() if kind == float("inf") else (every**kind).sum() ** (1 / kind)
    scale = jnp.minimum(most / (norm + 1e-6), 1.0)
    return a * scale, b * scale, norm


def _parameter_with(gradient: DTensor | torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


CLIP = dict(
    reference=clip_reference,
    options={"most": (0.5, 100.0), "kind": (2.0, 1.0, float("inf"))},
    nograd=("a", "b"),
    draw={"a": NORMAL, "b": NORMAL},
    dtypes=("float32",),
    roundings=4,
    reduction=("n", "m", "c"),
)


def _clip(parameters: list[nn.Parameter], most: float, kind: float) -> tuple[torch.Tensor, ...]:
    norm = nn.utils.clip_grad_norm_(parameters, most, norm_type=kind)
    return *(_local(p.grad) for p in parameters), norm.full_tensor() if isinstance(norm, DTensor) else norm


@scheme(inputs={"a": "n/dp c", "b": "m/dp c"}, outputs=("n/dp c", "m/dp c", "dp=I"), mesh={"dp": (1, 2, 4)}, **CLIP)
def clip_of_sharded_gradients(mesh: Any, a: Any, b: Any, most: float, kind: float) -> Any:
    parts = (sharded(mesh, part.clone(), 0, mesh.total(dim)) for part, dim in ((a, "n"), (b, "m")))
    return _clip([_parameter_with(part) for part in parts], most, kind)


@scheme(
    inputs={"a": "n/dp c", "b": "m/tp c"},
    outputs=("n/dp c tp=I", "m/tp c dp=I", "dp=I tp=I"),
    mesh={"dp": (1, 2), "tp": (1, 2)},
    **CLIP,
)
def clip_over_two_meshes(mesh: Any, a: Any, b: Any, most: float, kind: float) -> Any:
    """One parameter on the dp mesh and one on the tp mesh. As torch asks, a total_norm is computed for each mesh."""
    on = mesh.device_mesh
    first = _parameter_with(DTensor.from_local(a.clone(), on["dp"], [Shard(0)], run_check=False))
    second = _parameter_with(DTensor.from_local(b.clone(), on["tp"], [Shard(0)], run_check=False))
    norms = [nn.utils.get_total_norm([p.grad], norm_type=kind).full_tensor() for p in (first, second)]
    norm = torch.linalg.vector_norm(torch.stack(norms), kind)
    for parameter in (first, second):
        nn.utils.clip_grads_with_norm_([parameter], most, norm)
    return _local(first.grad), _local(second.grad), norm
