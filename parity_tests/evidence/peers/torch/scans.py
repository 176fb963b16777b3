"""Scans of a DTensor along its sharded dim and along the other dim, counted from the front and from the end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from parity_tests.evidence.peers.torch.shards import chunked, sharded
from shardproof import scheme, values

SCANS = {
    "cumsum": (lambda x, dim: x.cumsum(dim), lambda x: jnp.cumsum(x, -1)),
    "cumprod": (lambda x, dim: x.cumprod(dim), lambda x: jnp.exp(jnp.cumsum(jnp.log(x), -1))),
    "logcumsumexp": (lambda x, dim: x.logcumsumexp(dim), lambda x: jax.lax.cumlogsumexp(x, x.ndim - 1)),
}


def _declare(name: str, sharded_dim: int, scan_dim: int, layout: str) -> None:
    torch_scan, jax_scan = SCANS[name]

    def scan(mesh: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid() if name == "cumprod" else x
        return torch_scan(sharded(mesh, x, sharded_dim, mesh.total("nc"[sharded_dim])), scan_dim).full_tensor()

    suffix = "" if layout == "even" else ":chunked"
    place = "across" if sharded_dim == 0 else "from_the_end" if scan_dim < 0 else "from_the_front"
    scan.__name__ = f"{name}_{place}_{layout}"
    scheme(
        reference=lambda x: jax_scan(jax.nn.sigmoid(x) if name == "cumprod" else x),
        mesh={"tp": (1, 2, 4)},
        inputs={"x": (f"n/tp{suffix} c", f"n c/tp{suffix}")[sharded_dim]},
        outputs="n c tp=I",
        layouts={} if layout == "even" else {"chunked": chunked},
        draw={"x": values("normal")},
        nograd=("x",) if name == "cumprod" else (),  # its backward mixes tensors and DTensors, which torch rejects
        dtypes=("float32",),
        roundings=4,
        reduction=("c",),
    )(scan)


for _name in SCANS:
    _declare(_name, 0, -1, "even")
    _declare(_name, 1, -1, "even")
    for _layout in ("even", "uneven"):
        _declare(_name, 1, 1, _layout)
