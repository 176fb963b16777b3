"""The state that a segment leaves behind if none enters it, and what a state that enters adds to its outputs.

Logarithms of decays are summed inside each segment: no other segment is in a sum, and no long sum is subtracted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from torch_impl.kernels import rows_at
from torch_impl.mamba.segments import Blocks


def running_sums(logs: Float[Tensor, "b t h"], ids: Int64[Tensor, " t"]) -> Float[Tensor, "b t h"]:
    """The sum of logs from the start of each token's segment to the token; `ids` names segments, each one run.

    Cost: log2(t) additions of logs, as many for any segments. Saves a mask for each.
    """
    total, reach = logs, 1
    while reach < len(ids):
        is_same = (ids[reach:] == ids[:-reach])[:, None]
        further = torch.where(is_same, total[:, :-reach], 0.0)
        total = total + F.pad(further, (0, 0, reach, 0))
        reach *= 2
    return total


def sums_after(logs: Float[Tensor, "b t h"], ids: Int64[Tensor, " t"]) -> Float[Tensor, "b t h"]:
    """The sum of logs of all later tokens of each token's segment."""
    from_here = running_sums(logs.flip(1), ids.flip(0)).flip(1)
    is_same = (ids[1:] == ids[:-1])[:, None]
    return F.pad(torch.where(is_same, from_here[:, 1:], 0.0), (0, 0, 0, 1))


def states_left(
    u: Float[Tensor, "b t h p"], B: Float[Tensor, "b t g n"], after: Float[Tensor, "b t h"], blocks: Blocks, count: int
) -> Float[Tensor, "b k h p n"]:
    """The sum of exp(after[t]) u[t] B[t]^T over each of `count` segments.

    Cost: t * h * p * n multiplications, one state a block.
    """
    u = _cut(u * after.exp()[..., None], blocks).unflatten(3, (B.shape[2], -1))
    each = torch.einsum("bmlgep,bmlgn->bmgepn", u, _cut(B, blocks)).flatten(2, 3)
    left = each.new_zeros(len(each), count, *each.shape[2:])
    return left.index_add(1, blocks.segment, each)


def read_entering(
    C: Float[Tensor, "b t g n"], since: Float[Tensor, "b t h"], entering: Float[Tensor, "b k h p n"], blocks: Blocks
) -> Float[Tensor, "b t h p"]:
    """exp(since[t]) entering C[t], of the state that enters t's segment; 0 where none can.

    Cost: t * h * p * n multiplications, one state a block.
    """
    states = rows_at(entering, blocks.segment, 1).unflatten(2, (C.shape[2], -1))
    read = torch.einsum("bmlgn,bmgepn->bmlgep", _cut(C, blocks), states).flatten(3, 4).flatten(1, 2)
    return rows_at(with_zeros(read), blocks.place, 1) * since.exp()[..., None]


def with_zeros(x: Float[Tensor, "b t *a"]) -> Float[Tensor, "b t+1 *a"]:
    """x with a row of zeros after its last."""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))


def _cut(x: Float[Tensor, "b t *a"], blocks: Blocks) -> Float[Tensor, "b m l *a"]:
    return rows_at(with_zeros(x), blocks.rows.flatten(), 1).unflatten(1, blocks.rows.shape)
