"""What the cotangents of looked-up ids ask of a row's gradient, slot by slot.

A row looks up k ids, of which this rank owns some and two may be equal. At the column of an id the gradient is
own (1 - p) - p others, elsewhere -p total: own, others and total are sums of cotangents, each a sum of its own and no
difference of two, since p may be all but 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.vocab_parallel.statistics import NOBODYS


class Asked(NamedTuple):
    """Slots in any order; one that this rank does not own repeats one that it does, if there is any."""

    column: Int[Tensor, "n k"]
    own: Float[Tensor, "n k"]
    others: Float[Tensor, "n k"] | None  # None where k is 1
    total: Float[Tensor, " n"]

    def rows(self, part: slice) -> Asked:
        """Some of the rows."""
        others = None if self.others is None else self.others[part]
        return Asked(self.column[part], self.own[part], others, self.total[part])


def asked_of(column: Int[Tensor, "n k"], g: Float[Tensor, "n k"]) -> Asked:
    """The sums of cotangents g of k >= 1 columns; an id that nobody owns asks nothing."""
    g = torch.where(column == NOBODYS, 0.0, g)
    if column.shape[-1] == 1:
        return Asked(column, g, None, g.squeeze(-1))
    column = column.contiguous()
    in_order, order = column.sort(-1)
    first = torch.searchsorted(in_order, column)
    past = torch.searchsorted(in_order, column, right=True)
    sorted_g = g.gather(-1, order)
    before = F.pad(sorted_g.cumsum(-1), (1, 0)).gather(-1, first)
    after = F.pad(sorted_g.flip(-1).cumsum(-1).flip(-1), (0, 1)).gather(-1, past)
    own = torch.zeros_like(g).scatter_add_(-1, first, g).gather(-1, first)
    # All slots are written to the gradient at once: one of another rank must not undo what this rank's writes.
    slot = torch.arange(column.shape[-1], device=column.device)
    source = torch.where(column >= 0, slot, order[:, -1:])
    return Asked(column.gather(-1, source), own.gather(-1, source), (before + after).gather(-1, source), g.sum(-1))
