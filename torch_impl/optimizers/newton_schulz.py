"""Newton-Schulz on local matrices, or on matrices that a group of ranks shards by rows or columns.

    X <- X / ||X||,   then `steps` times   X <- a X + X (b G + c G^2),   G = X^T X

maps each singular value s to a s + b s^3 + c s^5, which brings all of them near 1 without a decomposition. Multiplying
by G = X X^T from the left gives the same matrix, so X here is always [..., s, k] with its longer or its sharded dim
first, and G is k x k.

There are two routes for sharded matrices, with the same result:

- owners: each matrix is sent to one rank, which iterates on the whole of it and sends the shards back
- sharded: no matrix is gathered; the ranks add up ||X||^2 and, in every step, the upper triangles of G

`fewest_bytes` returns the route that sends less.
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

from torch_impl.collectives import accumulator, no_autocast
from torch_impl.collectives.plain import all_reduce_sum
from torch_impl.contract import PositiveInt, Sharded, contract

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # from https://kellerjordan.github.io/posts/muon/
MIN_NORM = 1e-7  # a matrix with a smaller norm is divided by this instead
STEPS = 5
Route = Literal["owners", "sharded"]


@contract
def newton_schulz(x: Sharded[Tensor, "... m n"], *, steps: PositiveInt = STEPS) -> Sharded[Tensor, "... m n"]:
    """Bring all singular values of each matrix near 1. Computed in float32 or wider, returned in the dtype of x.

    X <- X / max(||X||, 1e-7),   then `steps` times   X <- a X + (b A + c A^2) X   with   A = X X^T

    Cost:   no collective. 2 m n k + k^3 multiplications for each matrix and step, with k = min(m, n).
    Errors: TypeError if x is not a tensor; ValueError if it is not a matrix or not floating, or if steps is less
            than 1.
    Source: https://kellerjordan.github.io/posts/muon/, including the coefficients.
    """
    return orthogonalized(x, steps, accumulator(x.dtype))


@contract
def fewest_bytes(
    sharded: PositiveInt, other: PositiveInt, world: PositiveInt, *, steps: PositiveInt = STEPS, itemsize: int = 4
) -> Route:
    """The route that sends fewer bytes for a matrix whose dim of size `sharded` is sharded over `world` ranks.

    With s = `sharded`, k = `other` and `itemsize` bytes for each element that is sent, a rank sends

        owners    2 (world - 1) / world * s k / world * itemsize                     in the mean over ranks
        sharded   2 (world - 1) / world * (8 + steps * k (k + 1) / 2 * max(itemsize, 4))      with ring all_reduces

    bytes. "sharded" pays if a rank's shard is much longer than the other dim: s / world > 2.5 (k + 1) for five `steps`
    in float32.

    Errors: TypeError and ValueError for sizes that are not positive integers.
    """
    to_owners = sharded * other * itemsize / world
    added = 8 + steps * other * (other + 1) / 2 * max(itemsize, 4)
    return "owners" if to_owners <= added else "sharded"


@dataclass(frozen=True)
class ShardedMatrix:
    """This rank's rows [s_r, k] of a sharded matrix. Rank r of the group has `lengths[r]` rows, which may be 0.

    A matrix that is sharded by columns is passed transposed.
    """

    rows: Tensor
    lengths: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.lengths), self.rows.shape[1]


def orthogonalized(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz on local matrices [..., m, n]; computed in `dtype`, returned in the dtype of x."""
    is_wide = x.shape[-2] < x.shape[-1]
    [result] = _iterate([(x.mT if is_wide else x).to(dtype)], steps, None)
    return (result.mT if is_wide else result).to(x.dtype)


def orthogonalized_in_shards(
    matrices: Sequence[ShardedMatrix], group: ProcessGroup, steps: int, dtype: torch.dtype
) -> list[Tensor]:
    """Newton-Schulz on sharded matrices without gathering one; returns this rank's rows of each result.

    1 all_reduce with a float64 per matrix, then `steps` all_reduces with k (k + 1) / 2 elements per matrix, float32 or
    wider.
    """
    results = _iterate([matrix.rows.to(dtype) for matrix in matrices], steps, group)
    return [result.to(matrix.rows.dtype) for matrix, result in zip(matrices, results, strict=True)]


def orthogonalized_by_owners(
    matrices: Sequence[ShardedMatrix], group: ProcessGroup, steps: int, dtype: torch.dtype
) -> list[Tensor]:
    """Newton-Schulz on sharded matrices, each gathered on its owner; returns this rank's rows of each result.

    2 all_to_all: the first sends this rank's rows of all matrices to the owners, the second sends back all rows of
    the matrices that this rank owns.
    """
    world, rank = group.size(), group.rank()
    owner = owners([matrix.shape for matrix in matrices], world)
    by_owner = [[i for i in range(len(matrices)) if owner[i] == each] for each in range(world)]
    owned = [matrices[i] for i in by_owner[rank]]
    # 1. Send every matrix's rows to its owner, which gets rank 0's rows of all its matrices, then rank 1's, and so on.
    shapes_sent = [[tuple(matrices[i].rows.shape) for i in each] for each in by_owner]
    shapes_received = [[(matrix.lengths[each], matrix.shape[1]) for matrix in owned] for each in range(world)]
    rows = [[matrices[i].rows for i in each] for each in by_owner]
    received = _exchange(rows, shapes_received, matrices[0].rows, group)
    # 2. Iterate on the matrices that this rank owns.
    results = _orthogonalize_by_shape([torch.cat(parts) for parts in zip(*received, strict=True)], steps, dtype)
    # 3. Send the rows of the results back to the ranks that the rows came from.
    parts = [result.split(matrix.lengths) for result, matrix in zip(results, owned, strict=True)]
    returned = _exchange([[each[to] for each in parts] for to in range(world)], shapes_sent, matrices[0].rows, group)
    by_index = {
        i: x for indices, tensors in zip(by_owner, returned, strict=True) for i, x in zip(indices, tensors, strict=True)
    }
    return [by_index[i] for i in range(len(matrices))]


def owners(shapes: Sequence[tuple[int, int]], world: int) -> list[int]:
    """Assign each matrix to a rank: in order of falling cost, each to the rank with the lowest total cost so far.

    Matrices of equal cost go to ranks 0, 1, 2, ... in turn.
    """
    load, owner = [0] * world, [0] * len(shapes)
    costs = [_products(*shape) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    return owner


def _products(m: int, n: int) -> int:
    """The multiplications of one step: X^T X, G G, and X times b G + c G^2."""
    k = min(m, n)
    return 2 * m * n * k + k**3


def _iterate(matrices: list[Tensor], steps: int, group: ProcessGroup | None) -> list[Tensor]:
    """Iterate on matrices [..., s, k] whose rows are sharded over `group`, or are all on this rank without one."""
    a, b, c = COEFFICIENTS
    squares = [torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64).square() for x in matrices]
    norms = [each.sqrt().clamp_min(MIN_NORM)[..., None, None] for each in _sum_over_group(squares, group)]
    matrices = [x / norm.to(x.dtype) for x, norm in zip(matrices, norms, strict=True)]
    with no_autocast(matrices[0].device):
        for _ in range(steps):
            grams = _sum_symmetric([x.mT @ x for x in matrices], group)
            matrices = [a * x + x @ (b * gram + c * gram @ gram) for x, gram in zip(matrices, grams, strict=True)]
    return matrices


def _sum_over_group(tensors: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Sum each tensor over the group, all in one all_reduce."""
    if group is None:
        return tensors
    total = all_reduce_sum(torch.cat([x.reshape(-1) for x in tensors]), group)
    return _split(total, [tuple(x.shape) for x in tensors])


def _sum_symmetric(grams: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Sum symmetric matrices [k, k] over the group in one all_reduce, sending only their upper triangles."""
    if group is None:
        return grams
    triangles = [torch.triu_indices(*gram.shape, device=gram.device).unbind() for gram in grams]
    sums = _sum_over_group([gram[i, j] for gram, (i, j) in zip(grams, triangles, strict=True)], group)
    for gram, (i, j), total in zip(grams, triangles, sums, strict=True):
        gram[i, j] = total
        gram[j, i] = total
    return grams


def _orthogonalize_by_shape(matrices: list[Tensor], steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Orthogonalize matrices of equal shape as one batch, which is faster on an accelerator."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for i, x in enumerate(matrices):
        by_shape[x.shape].append(i)
    results = list(matrices)
    for indices in by_shape.values():
        batch = orthogonalized(torch.stack([matrices[i] for i in indices]), steps, dtype)
        for i, result in zip(indices, batch, strict=True):
            results[i] = result
    return results


def _exchange(
    sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor, group: ProcessGroup
) -> list[list[Tensor]]:
    """Send a list of tensors to each rank; returns the lists from each rank, with these shapes. One all_to_all."""
    none = like.new_empty(0)  # a rank that owns no matrix still takes part
    flat = torch.cat([none, *(x.reshape(-1) for tensors in sent for x in tensors)])
    sizes_sent = [sum(x.numel() for x in tensors) for tensors in sent]
    sizes = [sum(math.prod(shape) for shape in each) for each in shapes]
    received = flat.new_empty(sum(sizes))
    dist.all_to_all_single(received, flat, sizes, sizes_sent, group=group)
    return [_split(part, each) for part, each in zip(received.split(sizes), shapes, strict=True)]


def _split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split a flat tensor into consecutive tensors of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
