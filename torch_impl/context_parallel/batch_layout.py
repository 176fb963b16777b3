"""The layout of a batch in its caller's coordinates: shard and gather any tensor with an entry for each token.

A dense batch is sharded row by row, padded on the right. A batch of packed rows is one stream of b * s tokens, which
may be split into chunks. In both cases `shard` takes [b, s, ...] and `gather` returns it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import large_tensors
from torch_impl.collectives.lengths import dim_from_front
from torch_impl.contract import GradientType, Rejected, ShardedAny, contract
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.fill import Fill, fill_of


@dataclass(frozen=True)
class BatchLayout:
    """How a batch of `shape` [b, s], or [t] for one stream, is sharded over `group` (None for one rank).

    `tokens` is the layout of each row, or with `is_stream` the layout of all rows concatenated, split into `chunks`
    equal chunks. Pass `tokens` to attention as its layout.

    >>> import torch
    >>> tokens = TokenLayout.packed([0, 4, 8], cp_size=2, cp_rank=0)
    >>> BatchLayout(tokens, (2, 4), None, chunks=2, is_stream=True).shard(torch.arange(8).view(2, 4))
    tensor([[0, 3],
            [4, 7]])
    """

    tokens: TokenLayout
    shape: tuple[int, ...]
    group: ProcessGroup | None
    chunks: int = 1
    is_stream: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on this rank: [b, s/cp] for rows, [t/cp] for a stream, [m, t/(m cp)] for m chunks."""
        local = self.tokens.counts[self.tokens.cp_rank]
        if not self.is_stream:
            return self.shape[0], local
        return (self.chunks, local // self.chunks) if self.chunks > 1 else (local,)

    @contract("BatchLayout.shard")
    def shard(self, x: ShardedAny[Tensor, "..."], *, dim: int = 0, fill: Fill = 0) -> Shaped[Tensor, "*local"]:
        """Shard `x`, which has the dims `shape` from `dim` on; a dense row is padded by `fill`.

            x  "b s cp=R"   ->   "b s/cp" of rows, "t/cp" of a stream, "m t/cp" of chunks,   t = b s / m

        Any dtype; the shard has the same dtype. Differentiable.

        Cost:   no collective; one copy of the shard, and one of x if it is padded.
        Errors: TypeError for a `fill` that is no number; ValueError if x does not have `shape` at `dim`, and for a
                `fill` that its dtype cannot represent, also where nothing is padded.
        """
        dim, fill = self._place("shard", x, dim, self.shape), fill_of(x, fill, "fill")
        if not self.is_stream:
            more = self.tokens.total - self.shape[1]
            # F.pad counts dims from the last.
            padded = F.pad(x, [*[0, 0] * (x.ndim - 2 - dim), 0, more], value=fill) if more else x
            return large_tensors.index_select(padded, self.tokens.local_index, dim + 1)
        stream = x.flatten(dim, dim + len(self.shape) - 1)
        return large_tensors.index_select(stream, self.tokens.local_index, dim).unflatten(dim, self.local_shape)

    @contract("BatchLayout.gather")
    def gather(
        self, x: ShardedAny[Tensor, "..."], *, dim: int = 0, gradient: GradientType = "R"
    ) -> Shaped[Tensor, "*full"]:
        """Gather shards `x`, which have the dims `local_shape` from `dim` on, into the caller's coordinates.

            x  as `shard` returns it   ->   "b s cp=R"  or, with gradient="I",  "b s cp=I"

        The padding of dense rows is dropped; the padding of packed rows is part of the batch and stays. `gradient` is
        as in `TokenLayout.unshard`.

        Cost:   forward 1 all_gather; backward 1 reduce_scatter (R, summed in float32 or wider) or none (I). None
                without a group. Saves the index.
        Errors: ValueError for an unknown gradient type, or if x does not have `local_shape` at `dim`.
        """
        dim = self._place("gather", x, dim, self.local_shape)
        if not self.is_stream:
            return self._unshard(x, dim + 1, gradient).narrow(dim + 1, 0, self.shape[1])
        stream = x.flatten(dim, dim + len(self.local_shape) - 1)
        return self._unshard(stream, dim, gradient).unflatten(dim, self.shape)

    def _unshard(self, x: Tensor, dim: int, gradient: GradientType) -> Tensor:
        # Without a group there is one rank, which has every row in order.
        return x if self.group is None else self.tokens.unshard(x, dim, self.group, gradient=gradient)

    def _place(self, name: str, x: Tensor, dim: int, shape: tuple[int, ...]) -> int:
        """`dim`, counted from the front. Errors: ValueError unless x has `shape` from there on."""
        dim = dim_from_front("dim", dim, x)
        if tuple(x.shape[dim : dim + len(shape)]) != shape:
            where = f"x is {list(x.shape)}, the batch is {list(shape)} {'here' if name == 'gather' else 'in full'}"
            raise Rejected(f"{where}; pass a tensor that has these dims from dim={dim} on")
        return dim
