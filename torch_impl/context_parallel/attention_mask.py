"""What an attention mask says of a dense batch: padding on the right, which causal attention never sees, or more.

Under cp a mask's columns would have to be cut with the keys, so a mask is read once, on the whole batch, and dropped.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from torch_impl.layouts.divisibility import first


def padding_of(
    function: str, attention_mask: Shaped[Tensor, "*a"], shape: tuple[int, int]
) -> Bool[Tensor, "b s"] | None:
    """True where a mask of `shape` has padding on the right; None for all ones. One read by the host.

    Errors: ValueError for left padding, holes, packing ids, other entries than 0 and 1, or a mask of another shape.
    """
    if attention_mask.ndim != 2:
        raise ValueError(
            f"{function}: attention_mask is {list(attention_mask.shape)}; it is [b, s] under cp, and packed sequences "
            "go with use_te=True, where cu_seqlens keep them apart"
        )
    if attention_mask.shape != shape:
        raise ValueError(
            f"{function}: attention_mask is {list(attention_mask.shape)}, the batch has {list(shape)} tokens; "
            "give one for each"
        )
    zeros = attention_mask == 0
    entries = attention_mask.double()
    is_fraction = ((entries != entries.trunc()) | entries.isinf()).any(1)
    real = (~zeros).sum(1)
    leading = zeros.long().cumprod(1).sum(1)
    behind = torch.arange(zeros.shape[1], device=zeros.device) >= real[:, None]
    least, most = attention_mask.aminmax(dim=1) if zeros.shape[1] else (real, real)
    is_odd = (zeros != behind).any(1)
    facts = torch.stack([real, leading, is_odd, least < 0, most.long(), is_fraction]).cpu()
    _refuse(function, facts, zeros.shape[1])
    return behind if bool((facts[0] < zeros.shape[1]).any()) else None


def restarts(position_ids: Tensor) -> bool:
    """Whether positions start anew inside a row. One read by the host."""
    return position_ids.ndim == 2 and bool((position_ids.diff() <= 0).any())


def _refuse(function: str, facts: Tensor, size: int) -> None:
    """`facts` by row: ones, zeros before the first, whether a zero is not behind or an entry negative, the largest,
    and whether an entry is no finite integer."""
    leading, is_odd, is_additive, largest, is_fraction = facts[1:]
    for b in first(is_additive > 0):
        raise ValueError(f"{function}: attention_mask: row {b} has a negative entry; pass ones, and zeros for padding")
    for b in first(is_fraction > 0):
        raise ValueError(
            f"{function}: attention_mask: row {b} has an entry other than 0 and 1; pass ones, and zeros for padding"
        )
    for b in first(largest > 1):
        raise ValueError(
            f"{function}: attention_mask: row {b} has {int(largest[b])}, an id of packed sequences; pass use_te=True "
            "with seq_lens, where cu_seqlens keep them apart"
        )
    for b in first((leading > 0) & (leading < size)):
        raise ValueError(
            f"{function}: attention_mask: row {b} starts with {int(leading[b])} zeros; left padding is lost under cp; "
            "pad on the right"
        )
    for b in first(is_odd > 0):
        raise ValueError(
            f"{function}: attention_mask: row {b} has zeros between ones; holes are lost under cp; pad on the right"
        )
