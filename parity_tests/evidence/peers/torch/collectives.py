"""torch.distributed.nn.functional and the functional collectives with autograd: values and sums."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn

from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import scheme, values


def _spec(mesh: Any, **more: Any) -> dict[str, Any]:
    return dict(mesh=mesh, dtypes=("float32",), draw={"x": values("normal", "ties")}, **more)


TP = {"tp": (1, 2, 4)}
# Functions that take the rank of a source or destination; a group of only some ranks of the world is a finding.
IN_THE_WORLD = {"excluded_conditions": (*CONTIGUOUS["excluded_conditions"], "larger_world")}


def identity(x: Any) -> Any:
    return x


# Sums. The backward of each is a sum of the cotangents: a rank uses the result for a term of its own (R).
@scheme(reference=identity, inputs={"x": "n c tp=P"}, outputs="n c tp=R", **_spec(TP))
def nn_all_reduce(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return dist_nn.all_reduce(x.clone(), group=mesh["tp"])


@scheme(reference=identity, inputs={"x": "n/tp c"}, outputs="n c tp=R", **_spec(TP, **CONTIGUOUS))
def nn_all_gather(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat(dist_nn.all_gather(x, group=mesh["tp"]))


@scheme(reference=identity, inputs={"x": "n/tp c"}, outputs="n c tp=R", **_spec(TP, **CONTIGUOUS))
def nn_all_gather_base(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0] * mesh.size("tp"), x.shape[1])
    return dist_nn._all_gather_base(out, x, group=mesh["tp"])


@scheme(reference=identity, inputs={"x": "n c tp=P"}, outputs="n/tp c", **_spec(TP, **CONTIGUOUS))
def nn_reduce_scatter(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(mesh.size("tp"))]
    return dist_nn.reduce_scatter(torch.empty_like(parts[0]), parts, group=mesh["tp"])


@scheme(reference=identity, inputs={"x": "n/tp c"}, outputs="n c/tp", **_spec(TP, **CONTIGUOUS))
def nn_all_to_all(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(mesh.size("tp"), 1)]
    outs = [torch.empty_like(part) for part in parts]
    return torch.cat(dist_nn.all_to_all(outs, parts, group=mesh["tp"]))


@scheme(reference=identity, inputs={"x": "n/tp c"}, outputs="n c/tp", **_spec(TP, **CONTIGUOUS))
def nn_all_to_all_single(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape[0], x.shape[1] // mesh.size("tp")
    sent = x.view(rows, -1, columns).transpose(0, 1).reshape(-1, columns)
    return dist_nn.all_to_all_single(torch.empty_like(sent), sent, group=mesh["tp"])


def _first(mesh: Any) -> int:
    """The world rank of the group's first member, as these functions take it."""
    return dist.get_global_rank(mesh["tp"], 0)


@scheme(reference=identity, inputs={"x": "n c tp=P"}, outputs="n c tp=R", **_spec(TP, **IN_THE_WORLD))
def nn_reduce_then_broadcast(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    total = dist_nn.reduce(x.clone(), _first(mesh), group=mesh["tp"])
    return dist_nn.broadcast(total, _first(mesh), group=mesh["tp"])


@scheme(reference=identity, inputs={"x": "n/tp c"}, outputs="n c tp=P", **_spec(TP, **IN_THE_WORLD))
def nn_gather(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    """The first rank has all rows, the others zeros."""
    return torch.cat(dist_nn.gather(x, _first(mesh), group=mesh["tp"]))


@scheme(reference=identity, inputs={"x": "n c tp=P"}, outputs="n/tp c", **_spec(TP, **IN_THE_WORLD))
def nn_reduce_then_scatter(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    total = dist_nn.reduce(x.clone(), _first(mesh), group=mesh["tp"])
    parts = [part.contiguous() for part in total.chunk(mesh.size("tp"))]
    return dist_nn.scatter(parts, _first(mesh), group=mesh["tp"])


# The same in one of two groups.
@scheme(
    reference=identity,
    inputs={"x": "n/dp c tp=P"},
    outputs="n/dp c tp=R",
    **_spec({"dp": (2,), "tp": (2,)}, **IN_THE_WORLD),
)
def nn_reduce_then_broadcast_in_two_groups(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return nn_reduce_then_broadcast.fn(mesh, x)


@scheme(
    reference=identity,
    inputs={"x": "n/dp/tp c"},
    outputs="n/dp c tp=P",
    **_spec({"dp": (2,), "tp": (2,)}, **IN_THE_WORLD),
)
def nn_gather_in_two_groups(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return nn_gather.fn(mesh, x)


# The same where the gradient is not contiguous.
@scheme(reference=lambda x: x.T, inputs={"x": "n/tp c"}, outputs="c n tp=R", **_spec(TP, **CONTIGUOUS))
def nn_all_gather_used_transposed(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat(dist_nn.all_gather(x, group=mesh["tp"])).t()


@scheme(reference=lambda x: x.T, inputs={"x": "n/tp c"}, outputs="c n tp=P", **_spec(TP, **IN_THE_WORLD))
def nn_gather_used_transposed(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat(dist_nn.gather(x, _first(mesh), group=mesh["tp"])).t()


# The functional collectives that have a backward.
@scheme(reference=identity, inputs={"x": "n/tp c"}, outputs="n c tp=R", **_spec(TP))
def functional_all_gather(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, mesh["tp"])


@scheme(reference=identity, inputs={"x": "n c/tp"}, outputs="n c tp=R", **_spec(TP))
def functional_all_gather_of_columns(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return funcol.all_gather_tensor_autograd(x, 1, mesh["tp"])


@scheme(reference=identity, inputs={"x": "n c tp=P"}, outputs="n/tp c", **_spec(TP))
def functional_reduce_scatter(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, "sum", 0, mesh["tp"])


@scheme(reference=identity, inputs={"x": "n c tp=P"}, outputs="n c/tp", **_spec(TP))
def functional_reduce_scatter_of_columns(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, "sum", 1, mesh["tp"])


@scheme(
    reference=lambda x: x,
    inputs={"x": "n c tp=P"},
    outputs="n/tp c",
    **_spec({"tp": (1, 2, 4)}),
)
def functional_reduce_scatter_of_a_mean(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    """A mean over ranks, times the number of ranks."""
    return funcol.reduce_scatter_tensor_autograd(x, "avg", 0, mesh["tp"]) * mesh.size("tp")


@scheme(reference=identity, inputs={"x": "n/tp c"}, outputs="n c/tp", **_spec(TP))
def functional_all_to_all(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape[0], x.shape[1] // mesh.size("tp")
    sent = x.view(rows, -1, columns).transpose(0, 1).reshape(-1, columns)
    return funcol.all_to_all_single_autograd(sent, None, None, mesh["tp"])


@scheme(reference=identity, inputs={"x": "n c tp=P"}, outputs="n c tp=R", **_spec(TP))
def functional_all_reduce(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(x, "sum", mesh["tp"])


@scheme(
    reference=lambda x: x / jnp.sqrt((x**2).mean((0, 1), keepdims=True)),
    inputs={"x": "n/dp c"},
    outputs="n/dp c",
    mesh={"dp": (1, 2, 4)},
    dtypes=("float32",),
    roundings=4,
    draw={"x": values("normal")},
    reduction=("n", "c"),
)
def norm_over_ranks(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalise each rank's rows by a mean square over all ranks, which a differentiable sum computes."""
    total = dist_nn.all_reduce((x**2).sum(), group=mesh["dp"])
    return x / (total / (x.numel() * dist.get_world_size(mesh["dp"]))).sqrt()
