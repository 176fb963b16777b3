"""The reduce operations: what several ranks' tensors become.

Terms are combined one after the other in rank order and in their own dtype, as a ring does: every rank gets the
same bits, and a narrow dtype rounds at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def name_of(op: object) -> str:
    """The name of a reduce op, as the ledger writes it; ValueError for one that no CPU backend has."""
    kind = getattr(op, "op", op)
    name = getattr(kind, "name", str(kind))
    if name not in _STEPS:
        raise ValueError(f"lockstep: reduce op {name} is not one of {', '.join(_STEPS)}; scale the tensor before")
    return name


def combined(name: str, terms: Sequence[Tensor]) -> Tensor:
    """One new tensor from the ranks' terms."""
    dtype = terms[0].dtype
    step = _STEPS[name]
    if dtype.is_floating_point and dtype.itemsize == 1:  # torch adds no 8-bit floats
        total = reduce(lambda a, b: step(a.float(), b.float()).to(dtype), terms)
        return (total.float() / len(terms)).to(dtype) if name == "AVG" else total.clone()
    total = reduce(step, terms[1:], terms[0].clone())
    if name != "AVG":
        return total
    if dtype == torch.bool:
        raise TypeError("lockstep: AVG of torch.bool has no meaning; use SUM, which is logical or")
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return torch.div(total, len(terms), rounding_mode="trunc" if whole else None)
