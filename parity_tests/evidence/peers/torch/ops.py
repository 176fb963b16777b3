"""Operations on one DTensor along its sharded dim, and products of two DTensors; shards are even or uneven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate

from parity_tests.evidence.peers.torch.shards import chunked, replicated, sharded
from shardproof import scheme, token_below, values

Unary = Callable[[Any], Any]
EPSILON = 1e-5


def _layer_norm(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)


def _cross_entropy_with_the_first(x: Any) -> Any:
    return (jax.nn.logsumexp(x, -1) - x[:, 0]).mean()


# Name -> (torch's call, the reference in JAX, the dims of the result). The input has the dims `n c`.
OPS: dict[str, tuple[Unary, Unary, str]] = {
    "softmax": (lambda x: x.softmax(-1), lambda x: jax.nn.softmax(x, -1), "n c"),
    "log_softmax": (lambda x: x.log_softmax(-1), lambda x: jax.nn.log_softmax(x, -1), "n c"),
    "sum": (lambda x: x.sum(-1), lambda x: x.sum(-1), "n"),
    "mean": (lambda x: x.mean(-1), lambda x: x.mean(-1), "n"),
    "mean_of_all": (lambda x: x.mean(), lambda x: x.mean(), ""),
    "variance": (lambda x: x.var(-1, correction=0), lambda x: x.var(-1), "n"),
    "logsumexp": (lambda x: x.logsumexp(-1), lambda x: jax.nn.logsumexp(x, -1), "n"),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), lambda x: jnp.sqrt((x**2).sum(-1)), "n"),
    "norm_of_all": (lambda x: torch.linalg.vector_norm(x), lambda x: jnp.sqrt((x**2).sum()), ""),
    "norm_1": (lambda x: torch.linalg.vector_norm(x, 1, dim=-1), lambda x: jnp.abs(x).sum(-1), "n"),
    "largest": (lambda x: x.amax(-1), lambda x: x.max(-1), "n"),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:], eps=EPSILON), _layer_norm, "n c"),
    "rms_norm": (
        lambda x: F.rms_norm(x, x.shape[-1:], eps=EPSILON),
        lambda x: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPSILON),
        "n c",
    ),
    "normalize": (lambda x: F.normalize(x, dim=-1), lambda x: x / jnp.sqrt((x**2).sum(-1, keepdims=True)), "n c"),
    # As torch's manual defines it. jax.nn.gelu uses erfc and keeps digits of large negative x that 1 + erf(x) loses.
    "gelu": (F.gelu, lambda x: x * (1 + jax.scipy.special.erf(x / jnp.sqrt(2.0))) / 2, "n c"),
    "transpose": (lambda x: x.t(), lambda x: x.T, "c n"),
    "flip": (lambda x: x.flip(-1), lambda x: x[:, ::-1], "n c"),
    "roll": (lambda x: x.roll(1, -1), lambda x: jnp.roll(x, 1, -1), "n c"),
    "tril": (lambda x: x.tril(), lambda x: jnp.tril(x), "n c"),
    "diagonal_of_square": (lambda x: (x @ x.t()).diagonal(), lambda x: (x**2).sum(-1), "n"),
    "first_column": (lambda x: x[:, 0], lambda x: x[:, 0], "n"),
    "beside_itself": (lambda x: torch.cat([x, x], 0), lambda x: jnp.concatenate([x, x], 0), "n2 c"),
    "centred": (lambda x: x - x.mean(-1, keepdim=True), lambda x: x - x.mean(-1, keepdims=True), "n c"),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, replicated_zeros(x)),
        _cross_entropy_with_the_first,
        "",
    ),
}


FEW_COLUMNS = {"c": (1, 3)}  # so few columns that ranks are left without one


def replicated_zeros(x: Any) -> Any:
    """A target of zeros for the rows of x."""
    from torch.distributed.tensor import zeros

    return zeros(x.shape[0], dtype=torch.long, device_mesh=x.device_mesh, placements=[Replicate()])


def _declare(name: str, layout: str) -> None:
    of_torch, of_jax, dims = OPS[name]

    def op(mesh: Any, x: torch.Tensor) -> torch.Tensor:
        return of_torch(sharded(mesh, x, 1, mesh.total("c"))).full_tensor()

    op.__name__ = f"{name}_{layout}"
    scheme(
        reference=lambda x: of_jax(x),
        mesh={"tp": (1, 2, 4)},
        inputs={"x": "n c/tp" if layout == "even" else "n c/tp:chunked"},
        outputs=f"{dims} tp=I".strip(),
        layouts={} if layout == "even" else {"chunked": chunked},
        dims={"n2": "2*n"} if "n2" in dims else FEW_COLUMNS if (name, layout) == ("largest", "uneven") else {},
        draw={"x": values("normal")},
        dtypes=("float32",),
        roundings=4,
        reduction=("c",),
    )(op)


for _name in OPS:
    for _layout in ("even", "uneven"):
        _declare(_name, _layout)


# Name -> the sharded dims of x [b, i] and of w [o, i]; None for a replicated tensor.
PRODUCTS: dict[str, tuple[int | None, int | None]] = {
    "of_rows": (0, None),
    "of_columns": (None, 0),
    "of_inner_dim": (1, 1),
    "of_inner_dim_and_columns": (1, 0),
    "of_rows_and_columns": (0, 0),
    "of_one_inner_dim": (1, None),
}


def _declare_product(name: str, layout: str) -> None:
    x_dim, w_dim = PRODUCTS[name]
    suffix = "" if layout == "even" else ":chunked"

    def spec(first: str, second: str, dim: int | None) -> str:
        parts = [f"{each}/tp{suffix}" if place == dim else each for place, each in enumerate((first, second))]
        return " ".join(parts) + (" tp=I" if dim is None else "")

    def product(mesh: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        left = replicated(mesh, x) if x_dim is None else sharded(mesh, x, x_dim, mesh.total("bi"[x_dim]))
        right = replicated(mesh, w) if w_dim is None else sharded(mesh, w, w_dim, mesh.total("oi"[w_dim]))
        return F.linear(left, right).full_tensor()

    product.__name__ = f"product_{name}_{layout}"
    scheme(
        reference=lambda x, w: x @ w.T,
        mesh={"tp": (1, 2, 4)},
        inputs={"x": spec("b", "i", x_dim), "w": spec("o", "i", w_dim)},
        outputs="b o tp=I",
        layouts={} if layout == "even" else {"chunked": chunked},
        draw={"x": values("normal"), "w": values("normal")},
        dtypes=("float32",),
        reduction=("i",),
    )(product)


for _name in PRODUCTS:
    for _layout in ("even", "uneven"):
        _declare_product(_name, _layout)


def _declare_embedding(dim: int, layout: str) -> None:
    suffix = "" if layout == "even" else ":chunked"

    def embedding(mesh: Any, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        full = sharded(mesh, table, dim, mesh.total("vd"[dim]))
        return F.embedding(replicated(mesh, ids), full).full_tensor()

    embedding.__name__ = f"embedding_of_{('rows', 'columns')[dim]}_{layout}"
    scheme(
        reference=lambda ids, table: table[ids],
        mesh={"tp": (1, 2, 4)},
        inputs={"ids": "b s", "table": (f"v/tp{suffix} d", f"v d/tp{suffix}")[dim]},
        outputs="b s d tp=I",
        layouts={} if layout == "even" else {"chunked": chunked},
        draw={"ids": token_below("v"), "table": values("normal")},
        dtypes=("float32",),
        reduction=("b", "s"),
    )(embedding)


for _dim in (0, 1):
    for _layout in ("even", "uneven"):
        _declare_embedding(_dim, _layout)
