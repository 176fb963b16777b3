"""Whether results that are about to be timed are as near to the exact ones as those of the way beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NOT_FURTHER_OFF = 4.0  # times the other way's own error, before anything is timed


def error_ratio(ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor], what: str) -> float:
    """Our largest error over that of the other way, of each tensor; `exact` are in float64.

    Of few elements the other way's may all be off by less than one rounding of the largest of them, by chance: its
    error is taken to be that at least.

    Errors: RuntimeError, with `what` was to be timed, if it is far larger.
    """
    our_errors, other_errors = (
        torch.stack([(x.double() - y).abs().max() for x, y in zip(results, exact, strict=True)])
        for results in (ours, theirs)
    )
    roundings = torch.stack([y.abs().max() * torch.finfo(x.dtype).eps / 2 for x, y in zip(theirs, exact, strict=True)])
    worst = float(
        (our_errors / other_errors.maximum(roundings).clamp(min=1e-30)).max()
    )  # torch's: a NaN is the largest
    if not worst <= NOT_FURTHER_OFF:
        raise RuntimeError(f"benchmarks: {what} is {worst:.2g} times as far off; it is not timed")
    return worst
