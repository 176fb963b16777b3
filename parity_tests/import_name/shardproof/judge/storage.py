"""Numbers that a reference marks as `stored` are rounded to the tested dtype, as the function under test rounds them.

The function rounds the same number, but for the errors of its float32 arithmetic: |error| <= tau. If x - tau and
x + tau round to one number, the function has stored this number, and no error is left. Otherwise x lies next to the
middle of two neighbours, and the function may have stored either: their distance joins the error, with a random sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardproof.judge.bridge import inner_equations

GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly
K = 8.0  # root mean squares that an error may have: in every budget (`compare`), and before a number is rounded
FLOAT64_BITS = 52  # of the mantissa; `jax_ref.stored` names as many


@dataclass(frozen=True)
class Storage:
    """A 16-bit dtype: the digits of its numbers, and the exponent of the least normal one."""

    digits: int
    least_exponent: int

    def rounded(self, xp: Any, x: Any, tangent: Any, signs: Any) -> tuple[Any, Any]:
        """The stored x, and the tangent of its error. `signs` has a row for each direction."""
        stored, step = self._nearest(xp, x)
        if tangent is None:
            return stored, None
        tangent = xp.where(xp.isfinite(tangent), tangent, 0.0)
        # A tie is never certain: most of torch rounds it to even, but an embedding_bag on a CPU away from zero.
        least = xp.where(xp.isfinite(x), xp.abs(x), 0.0) * 2.0**-FLOAT64_BITS
        tau = K * xp.sqrt((tangent**2).mean(0)) + least
        is_certain = self.nearest(xp, x - tau) == self.nearest(xp, x + tau)
        # Steps are powers of 2. Without a factor of its own for each, two opposite ones would cancel.
        factors = 1.0 + xp.arange(signs.size).reshape(signs.shape) * GOLDEN % 1.0
        return stored, xp.where(is_certain[None], 0.0, tangent + signs * factors * step[None])

    def nearest(self, xp: Any, x: Any) -> Any:
        """The nearest number of the dtype, ties to even, as if its exponents had no upper end."""
        return self._nearest(xp, x)[0]

    def _nearest(self, xp: Any, x: Any) -> tuple[Any, Any]:
        """The nearest number, and the distance to the next one."""
        finite = xp.where(xp.isfinite(x), x, 0.0)
        _, exponent = xp.frexp(finite)  # |x| = m 2^exponent, 1/2 <= m < 1
        step = xp.ldexp(xp.ones_like(finite), xp.maximum(exponent, self.least_exponent + 1) - self.digits)
        return xp.where(xp.isfinite(x), xp.round(finite / step) * step, x), step


def storage_of(dtype: str) -> Storage | None:
    """The storage of a 16-bit dtype; None for float32 and float64, which have no wider sums."""
    info = torch.finfo(getattr(torch, dtype))
    if info.bits > 16:
        return None
    return Storage(digits=1 - int(np.log2(info.eps)), least_exponent=int(np.log2(info.tiny)))


def is_stored(equation: Any) -> bool:
    """Whether a traced operation is `jax_ref.stored`."""
    return equation.primitive.name == "reduce_precision" and equation.params["mantissa_bits"] == FLOAT64_BITS


def check_storage(equation: Any) -> None:
    """ValueError if a loop or a branch has numbers that are stored: only operations outside of them are rounded."""
    if any(map(is_stored, inner_equations(equation))):
        name = equation.primitive.name
        raise ValueError(
            f"stored() inside {name} would round nothing; write the loop or branch out, or mark its result"
        )
