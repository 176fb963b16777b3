"""Check that our function is about as accurate as the other one, before both are timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NOT_FURTHER_OFF = 4.0  # the largest ratio of our error to the other function's


def error_ratio(ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor], what: str) -> float:
    """The largest ratio, over all tensors, of our largest error to the other function's; `exact` are in float64.

    In a small tensor all of the other function's errors may happen to be below one rounding of the largest element, so
    its error is taken to be at least that rounding.

    Errors: RuntimeError that names `what`, the timed work, if our error is far larger.
    """
    our_errors, other_errors = (
        torch.stack([(x.double() - y).abs().max() for x, y in zip(results, exact, strict=True)])
        for results in (ours, theirs)
    )
    roundings = torch.stack([y.abs().max() * torch.finfo(x.dtype).eps / 2 for x, y in zip(theirs, exact, strict=True)])
    # Not Python's max, which may skip a NaN.
    worst = float((our_errors / other_errors.maximum(roundings).clamp(min=1e-30)).max())
    if not worst <= NOT_FURTHER_OFF:
        raise RuntimeError(f"benchmarks: {what} is {worst:.2g} times as far off; it is not timed")
    return worst
