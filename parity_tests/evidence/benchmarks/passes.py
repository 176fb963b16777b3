"""The time of bare passes over a rank's logits, on plain tensors: experiments that explain a missed promise.

Eager operations need at least the passes of the entropy, and a compiler the fused ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parity_tests.evidence.benchmarks.peer_arms import ArmInputs
from torch_impl.kernels import compiled

PAGE = 4096  # bytes
TILE_ROWS = 4
LOG2_E, FLOOR = math.log2(math.e), -(2.0**14)


def touch_new_memory(inputs: ArmInputs) -> None:
    """Allocate as much as a rank's logits, or its weight, take, and write one element of each page."""
    new = torch.empty_like(inputs.shard).flatten()
    new[:: PAGE // new.itemsize] = 0.0


def entropy_passes(inputs: ArmInputs) -> None:
    """The eager operations that the entropy adds to each tile of the logits: in the forward a floor, a product and its
    sum, in the backward a floor and a linear function. In float32 buffers that stay in a cache."""
    rows, width = inputs.shard.flatten(0, -2).shape
    terms, shifted = torch.ones(2, TILE_ROWS, width)
    of_row = torch.ones(TILE_ROWS, 1)
    for _ in range(0, rows, TILE_ROWS):
        terms.mul_(shifted.clamp_min_(FLOOR)).sum(-1)
        shifted.clamp_min_(FLOOR).mul_(of_row).add_(of_row)


def fused_passes(inputs: ArmInputs) -> None:
    """The softmax of the local columns alone, with no id and no exchange: each row's maximum and sum, and a gradient
    that is written over the logits. Two compiled functions."""
    logits = inputs.shard.flatten(0, -2)
    row_max, row_sum = compiled(_max_and_sum)(logits)
    compiled(_write_softmax)(logits, row_max, row_sum)


def _max_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    row_max = wide.amax(-1, keepdim=True)
    return row_max, ((wide - row_max) * LOG2_E).exp2().sum(-1, keepdim=True)


def _write_softmax(logits: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
    logits.copy_(((logits.float() - row_max) * LOG2_E).exp2() / row_sum)


NEW_MEMORY = "new memory of a gradient"  # the first write to each page of it, which in place is not needed
ALONE = {
    NEW_MEMORY: touch_new_memory,
    "the passes of the entropy": entropy_passes,
    "two fused passes over the logits": fused_passes,
}
