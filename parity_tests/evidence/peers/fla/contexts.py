"""fla's context parallelism: a rank's borders of packed sequences, and the rows it takes from its neighbour."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from fla.ops.cp import comm
from fla.ops.cp.context import build_cp_context

from shardproof import offsets, scheme, values

# `x` only says how long the stream is; the compared outputs are positions.
STREAM = dict(
    mesh={"cp": (1, 2, 4)},
    nograd=("x",),
    draw={"x": values("normal"), "cu": offsets("t", empty=False)},
    dims={"t": (16, 32)},
    dtypes=("float32",),
)


def positions(x: Any, cu: Any) -> Any:
    """The position of each token in its sequence."""
    token = jnp.arange(x.shape[0])
    return (token - cu[jnp.searchsorted(cu, token, side="right") - 1]).astype(x.dtype)


def _positions(borders: torch.Tensor, before: int, length: int) -> torch.Tensor:
    """The positions of this rank's tokens; its first sequence has `before` tokens on other ranks."""
    token = torch.arange(length)
    start = borders[torch.searchsorted(borders, token, right=True) - 1]
    return (token - start + torch.where(start == 0, before, 0)).float()


@scheme(reference=positions, inputs={"x": "t/cp", "cu": "q"}, outputs="t/cp", **STREAM)
def borders_of_a_rank(mesh: Any, x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    context = build_cp_context(cu.clone(), mesh["cp"])
    return _positions(context.cu_seqlens.long(), context.pre_num_conv_tokens, len(x))


@scheme(reference=positions, inputs={"x": "t/cp:dual_chunk_swap", "cu": "q"}, outputs="t/cp:dual_chunk_swap", **STREAM)
def borders_of_a_rank_in_zigzag(mesh: Any, x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    context = build_cp_context(cu.clone(), mesh["cp"], layout="zigzag")
    borders, half = context.cu_seqlens.long(), context.part_len
    front, back = borders[: context.front_num_seqs + 1], borders[context.front_num_seqs :] - half
    before = context.pre_num_conv_tokens_by_part
    return torch.cat([_positions(front, before[0], half), _positions(back, before[1], half)])


@scheme(reference=positions, inputs={"x": "t/cp", "cu": "q"}, outputs="t/cp", **STREAM)
def borders_of_a_buffer_that_is_filled_again(mesh: Any, x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    """The buffer of a training step: it had other borders in the step before."""
    buffer = torch.linspace(0, float(cu[-1]), len(cu)).long()
    build_cp_context(buffer, mesh["cp"])
    buffer.copy_(cu)
    context = build_cp_context(buffer, mesh["cp"])
    return _positions(context.cu_seqlens.long(), context.pre_num_conv_tokens, len(x))


ROWS = dict(
    mesh={"cp": (1, 2, 4)},
    inputs={"x": "n/cp d"},
    outputs="n/cp d",
    nograd=("x",),
    dims={"n": (4, 8)},
    draw={"x": values("normal")},
    dtypes=("float32",),
)


def _shift_to_next_rank(x: Any, mesh: Any) -> Any:
    rows = x.shape[0] // mesh["cp"]
    return jnp.concatenate([jnp.zeros_like(x[:rows]), x[:-rows]])


def _shift_to_previous_rank(x: Any, mesh: Any) -> Any:
    rows = x.shape[0] // mesh["cp"]
    return jnp.concatenate([x[rows:], jnp.zeros_like(x[:rows])])


@scheme(reference=_shift_to_next_rank, **ROWS)
def rows_of_the_rank_before(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return comm.conv_cp_send_recv_fwd(x.contiguous(), mesh["cp"])


@scheme(reference=_shift_to_previous_rank, **ROWS)
def rows_of_the_rank_after(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return comm.conv_cp_send_recv_bwd(x.contiguous(), mesh["cp"])


@scheme(reference=lambda x: x.sum(0), **{**ROWS, "outputs": "d cp=I", "reduction": ("n",)})
def sum_of_rows(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return comm.all_reduce_sum(x.sum(0), mesh["cp"])[0]
