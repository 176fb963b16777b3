"""Newton-Schulz on matrices that are on one rank, or whose rows or columns are sharded over a group.

    X <- X / ||X||,   then `steps` times   X <- a X + X (b G + c G^2),   G = X^T X

turns each singular value s into a s + b s^3 + c s^5, which brings all of them near 1 without a decomposition. With
G = X X^T on the left it is the same matrix, so that X here always has its longer or its sharded dim first, [..., s, k],
and G is k x k.

Two ways to do it over shards, which give the same matrix:

- to owners: each matrix is sent to one rank, which iterates on all of it and sends the shards back
- sharded: no matrix is gathered; the ranks add up ||X||^2 and, in every step, the upper triangles of G

`fewest_bytes` says which of them sends less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import all_reduce_sum
from torch_impl.contract import PositiveInt, Sharded, contract

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of https://kellerjordan.github.io/posts/muon/
MIN_NORM = 1e-7  # a matrix of a smaller norm is divided by this one
STEPS = 5
Route = Literal["owners", "sharded"]


@contract
def newton_schulz(x: Sharded[Tensor, "... m n"], *, steps: PositiveInt = STEPS) -> Sharded[Tensor, "... m n"]:
    """Each of the matrices with all singular values brought near 1, in float32 or wider and returned in x's dtype.

    X <- X / max(||X||, 1e-7),   then `steps` times   X <- a X + (b A + c A^2) X   with   A = X X^T

    Cost:   no collective. In each step 2 m n k + k^3 multiplications of a matrix, k = min(m, n).
    Errors: TypeError if x is no tensor; ValueError if it is no matrix or not floating, or if steps is less than 1.
    Source: https://kellerjordan.github.io/posts/muon/, coefficients included.
    """
    return orthogonalized(x, steps, accumulator(x.dtype))


@contract
def fewest_bytes(
    sharded: PositiveInt, other: PositiveInt, world: PositiveInt, *, steps: PositiveInt = STEPS, itemsize: int = 4
) -> Route:
    """Which route sends fewer bytes for a matrix whose dim of size `sharded` is sharded over `world` ranks.

    On the wire a rank sends, of a matrix s x k,

        owners    2 (world - 1) / world * s k / world * itemsize                     in the mean over ranks
        sharded   2 (world - 1) / world * (8 + steps * k (k + 1) / 2 * max(itemsize, 4))      all_reduces as rings

    so that "sharded" pays where a rank's shard is much longer than the other dim: s / world > 2.5 (k + 1) for five
    steps in float32. `itemsize` is that of the matrices as they are sent, `other` is k.

    Errors: TypeError and ValueError for sizes that are not positive integers.
    """
    to_owners = sharded * other * itemsize / world
    added = 8 + steps * other * (other + 1) / 2 * max(itemsize, 4)
    return "owners" if to_owners <= added else "sharded"


@dataclass(frozen=True)
class ShardedMatrix:
    """This rank's rows [s_r, k] of a matrix of which rank r of a group has `lengths[r]` rows, zero allowed.

    A matrix whose columns are sharded is the transposed one.
    """

    rows: Tensor
    lengths: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.lengths), self.rows.shape[1]


def orthogonalized(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Matrices [..., m, n] that are on this rank, computed in `dtype` and returned in that of x."""
    is_wide = x.shape[-2] < x.shape[-1]
    [result] = _iterated([(x.mT if is_wide else x).to(dtype)], steps, None)
    return (result.mT if is_wide else result).to(x.dtype)


def orthogonalized_in_shards(
    matrices: Sequence[ShardedMatrix], group: ProcessGroup, steps: int, dtype: torch.dtype
) -> list[Tensor]:
    """This rank's rows of each result. No matrix is gathered.

    1 all_reduce of a float64 for each matrix, and `steps` of k (k + 1) / 2 float32 or wider for each.
    """
    results = _iterated([matrix.rows.to(dtype) for matrix in matrices], steps, group)
    return [result.to(matrix.rows.dtype) for matrix, result in zip(matrices, results, strict=True)]


def orthogonalized_by_owners(
    matrices: Sequence[ShardedMatrix], group: ProcessGroup, steps: int, dtype: torch.dtype
) -> list[Tensor]:
    """This rank's rows of each result. Every matrix is on one rank in between.

    2 all_to_all: of this rank's rows of all matrices, and of all rows of the matrices that it owns.
    """
    world, rank = group.size(), group.rank()
    owner = owners([matrix.shape for matrix in matrices], world)
    by_owner = [[i for i in range(len(matrices)) if owner[i] == each] for each in range(world)]
    owned = [matrices[i] for i in by_owner[rank]]
    # 1. Rows of every matrix to its owner, which gets those of rank 0 of all its matrices, then those of rank 1.
    shapes_sent = [[tuple(matrices[i].rows.shape) for i in each] for each in by_owner]
    shapes_received = [[(matrix.lengths[each], matrix.shape[1]) for matrix in owned] for each in range(world)]
    rows = [[matrices[i].rows for i in each] for each in by_owner]
    received = _exchanged(rows, shapes_received, matrices[0].rows, group)
    # 2. The matrices that this rank owns.
    results = _alike_together([torch.cat(parts) for parts in zip(*received, strict=True)], steps, dtype)
    # 3. Back again: what came from a rank returns to it.
    parts = [result.split(matrix.lengths) for result, matrix in zip(results, owned, strict=True)]
    returned = _exchanged([[each[to] for each in parts] for to in range(world)], shapes_sent, matrices[0].rows, group)
    by_index = {
        i: x for indices, tensors in zip(by_owner, returned, strict=True) for i, x in zip(indices, tensors, strict=True)
    }
    return [by_index[i] for i in range(len(matrices))]


def owners(shapes: Sequence[tuple[int, int]], world: int) -> list[int]:
    """The rank that iterates on each matrix: the costliest first, each to the rank with the least to do so far.

    Of matrices that cost the same that is one rank after the other, from rank 0 on.
    """
    load, owner = [0] * world, [0] * len(shapes)
    costs = [_products(*shape) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    return owner


def _products(m: int, n: int) -> int:
    """Multiplications of a step: X^T X, G G and X times their sum."""
    k = min(m, n)
    return 2 * m * n * k + k**3


def _iterated(matrices: list[Tensor], steps: int, group: ProcessGroup | None) -> list[Tensor]:
    """The iteration on matrices [..., s, k], of whose rows each rank of `group` has a shard; without it, all."""
    a, b, c = COEFFICIENTS
    squares = [torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64).square() for x in matrices]
    norms = [each.sqrt().clamp_min(MIN_NORM)[..., None, None] for each in _summed(squares, group)]
    matrices = [x / norm.to(x.dtype) for x, norm in zip(matrices, norms, strict=True)]
    for _ in range(steps):
        grams = _summed_symmetric([x.mT @ x for x in matrices], group)
        matrices = [a * x + x @ (b * gram + c * gram @ gram) for x, gram in zip(matrices, grams, strict=True)]
    return matrices


def _summed(tensors: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Each of them summed over the group, all in one all_reduce."""
    if group is None:
        return tensors
    total = all_reduce_sum(torch.cat([x.reshape(-1) for x in tensors]), group)
    return _split(total, [tuple(x.shape) for x in tensors])


def _summed_symmetric(grams: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """The same of symmetric matrices [k, k], of which the upper triangles are sent."""
    if group is None:
        return grams
    triangles = [torch.triu_indices(*gram.shape, device=gram.device).unbind() for gram in grams]
    sums = _summed([gram[i, j] for gram, (i, j) in zip(grams, triangles, strict=True)], group)
    for gram, (i, j), total in zip(grams, triangles, sums, strict=True):
        gram[i, j] = total
        gram[j, i] = total
    return grams


def _alike_together(matrices: list[Tensor], steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Those of one shape as one batch, as an accelerator wants them."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for i, x in enumerate(matrices):
        by_shape[x.shape].append(i)
    results = list(matrices)
    for indices in by_shape.values():
        batch = orthogonalized(torch.stack([matrices[i] for i in indices]), steps, dtype)
        for i, result in zip(indices, batch, strict=True):
            results[i] = result
    return results


def _exchanged(
    sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor, group: ProcessGroup
) -> list[list[Tensor]]:
    """Tensors for each rank; returns those from each rank, which have these shapes. One all_to_all."""
    none = like.new_empty(0)  # a rank that owns no matrix takes part all the same
    flat = torch.cat([none, *(x.reshape(-1) for tensors in sent for x in tensors)])
    sizes_sent = [sum(x.numel() for x in tensors) for tensors in sent]
    sizes = [sum(math.prod(shape) for shape in each) for each in shapes]
    received = flat.new_empty(sum(sizes))
    dist.all_to_all_single(received, flat, sizes, sizes_sent, group=group)
    return [_split(part, each) for part, each in zip(received.split(sizes), shapes, strict=True)]


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes, one after the other in a flat one."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
