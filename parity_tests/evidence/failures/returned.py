"""Kinds of failure in a function's results or in the tensors it writes to, which a scheme's verdict shows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardproof.declaration import scheme
from shardproof.declare.draws import integers, values


def doubled(x: Any) -> Any:
    return 2.0 * x


declared = scheme(
    reference=doubled, mesh={"tp": (2, 4)}, inputs={"x": "b/tp"}, outputs="b/tp", draw={"x": values("normal")},
    dtypes=("float32",), dims={"b": (8,)},
)  # fmt: skip


@declared
def returns_none(mesh: Any, x: torch.Tensor) -> Any:
    return None if mesh.rank("tp") == 1 else 2 * x


@declared
def returns_another_structure(mesh: Any, x: torch.Tensor) -> Any:
    return (2 * x, x) if mesh.rank("tp") == 1 else 2 * x


@declared
def returns_nan(mesh: Any, x: torch.Tensor) -> Any:
    return 2 * x * float("nan") if mesh.rank("tp") == 1 else 2 * x


@declared
def writes_its_input(mesh: Any, x: torch.Tensor) -> Any:
    if mesh.rank("tp") != 1:
        return 2 * x
    y = 2 * x
    x.detach().zero_()
    return y


@declared
def returns_another_shape(mesh: Any, x: torch.Tensor) -> Any:
    return 2 * x[:1] if mesh.rank("tp") == 1 else 2 * x


@declared
def returns_another_dtype(mesh: Any, x: torch.Tensor) -> Any:
    return (2 * x).double() if mesh.rank("tp") == 1 else 2 * x


@declared
def returns_a_sparse_tensor(mesh: Any, x: torch.Tensor) -> Any:
    return (2 * x).to_sparse() if mesh.rank("tp") == 1 else 2 * x


@declared
def returns_a_meta_tensor(mesh: Any, x: torch.Tensor) -> Any:
    return (2 * x).to("meta") if mesh.rank("tp") == 1 else 2 * x


@declared
def returns_complex_numbers(mesh: Any, x: torch.Tensor) -> Any:
    return (2 * x).to(torch.complex64) if mesh.rank("tp") == 1 else 2 * x


@scheme(
    reference=lambda n: 2 * n, mesh={"tp": (2, 4)}, inputs={"n": "b/tp"}, outputs="b/tp",
    draw={"n": integers(0, 9)}, dims={"b": (8,)},
)  # fmt: skip
def returns_complex_numbers_for_integers(mesh: Any, n: Int[torch.Tensor, "b"]) -> Int[torch.Tensor, "b"]:
    return (2 * n).to(torch.complex64) if mesh.rank("tp") == 1 else 2 * n


@declared
def returns_a_freed_tensor(mesh: Any, x: torch.Tensor) -> Any:
    y = (2 * x).detach().clone()
    if mesh.rank("tp") == 1:
        y.untyped_storage().resize_(0)
    return y


@declared
def returns_a_replicated_dtensor(mesh: Any, x: torch.Tensor) -> Any:
    return DTensor.from_local(2 * x, mesh.device_mesh, [Replicate()])


@declared
def returns_a_partial_dtensor(mesh: Any, x: torch.Tensor) -> Any:
    return DTensor.from_local(2 * x, mesh.device_mesh, [Partial()])


@declared
def reads_before_the_wait(mesh: Any, x: torch.Tensor) -> Any:
    y = torch.zeros(4_000_000)
    work = dist.all_reduce(y, group=mesh["tp"], async_op=True)
    z = y[-1].item() if mesh.rank("tp") == 1 else 0.0
    assert work is not None
    work.wait()
    return 2 * x + z


@declared
def reads_what_it_never_waits_for(mesh: Any, x: torch.Tensor) -> Any:
    y = torch.zeros(4_000_000) + x.detach().sum()
    dist.all_reduce(y, group=mesh["tp"], async_op=True)
    return 2 * x + 0 * y[-1].item()


@declared
def changes_its_input_before_the_wait(mesh: Any, x: torch.Tensor) -> Any:
    y, parts = torch.zeros(2), [torch.zeros(2) for _ in range(mesh.size("tp"))]
    work = dist.all_gather(parts, y, group=mesh["tp"], async_op=True)
    if mesh.rank("tp") == 1:
        y += 1
    assert work is not None
    work.wait()
    return 2 * x


@declared
def changes_its_result_on_one_rank(mesh: Any, x: torch.Tensor) -> Any:
    return 3 * x if mesh.rank("tp") == 1 else 2 * x
