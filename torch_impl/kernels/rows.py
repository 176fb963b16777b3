"""Select rows of a tensor by an index array, the step that shards, packs and gathers sequences."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from torch_impl.collectives import large_tensors
from torch_impl.kernels.backend import checked_backend, compiled


def rows_at(
    x: Shaped[Tensor, "*a"], index: Int[Tensor, " m"], dim: int = 0, *, backend: str = "auto"
) -> Shaped[Tensor, "*b"]:
    """x[..., index, ...] along one dim, as a contiguous tensor; differentiable.

    Any dtype and strides; a row may be read several times, its cotangents then add up in x's dtype.
    `backend`: "auto" is Triton on CUDA and eager elsewhere; "eager", "compile" and "triton" force one.

    Cost:   reads and writes each selected row once, no collective; the Triton kernel copies x where its
            dims before or after `dim` cannot be flattened without. Backward zeroes and adds. Saves the index.
    Errors: ValueError for another backend, or Triton for a tensor that is not on CUDA; ImportError without
            Triton; IndexError for an index outside the dim (on CUDA the device's own assertion).
    """
    implementation = checked_backend("kernels.rows_at", backend, "x", x)
    if implementation == "triton":
        return _RowsAt.apply(x, index, dim % x.ndim)
    return (_index_select if implementation == "eager" else compiled(_index_select))(x, index, dim)


def _index_select(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """The eager equivalent of the kernel."""
    return large_tensors.index_select(x, index, dim % x.ndim)


class _RowsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int) -> Tensor:
        # Imported here, since only this route needs Triton.
        from torch_impl.kernels.row_gather import gather_rows

        ctx.save_for_backward(index)
        ctx.dim, ctx.shape = dim, x.shape
        return gather_rows(x, index, dim)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        # A row that was read several times receives several cotangents: add, do not assign.
        (index,) = ctx.saved_tensors
        return cotangent.new_zeros(ctx.shape).index_add(ctx.dim, index, cotangent), None, None
