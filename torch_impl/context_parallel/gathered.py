"""The keys of all ranks gathered at once: one message instead of a ring, and shares may be uneven.

Every rank holds all keys for the length of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from torch_impl.collectives.plain import gathered, scattered_sum
from torch_impl.context_parallel.blocks import Buffer
from torch_impl.context_parallel.exchanged import AddGradients
from torch_impl.context_parallel.pairs import Pairs


@dataclass(frozen=True)
class Gathered:
    """Cost: forward 1 all_gather of K and V; backward the same again and 1 reduce_scatter of their gradients."""

    group: ProcessGroup

    def keys(self, own: Buffer, pairs: Pairs) -> Iterator[tuple[int, Buffer]]:
        yield from enumerate(gathered(own, self.group, 0, pairs.counts).split(pairs.counts))

    def gradients(self, own: Buffer, pairs: Pairs, dtype: torch.dtype, add: AddGradients) -> Buffer:
        sums = own.new_zeros(sum(pairs.counts), *own.shape[1:], dtype=dtype)
        shares = sums.split(pairs.counts)
        for source, keys in self.keys(own, pairs):
            add(source, keys, lambda share=shares[source]: share)
        return scattered_sum(sums, self.group, 0, pairs.counts)
