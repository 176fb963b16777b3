"""The second derivative of a call, judged by an identity that needs no reference.

The gradient g of <outputs, c> is linear in the cotangents c. So for every direction v of the inputs, the derivative h
of <g, v> with respect to c has <h, c> = <g, v>. A rank computes its terms of both sums; `imbalance` adds them up over
all ranks. The n copies of an invariant tensor count 1 / n each, so a wrong copy on any rank changes the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardproof.declare.declared import Argument
from shardproof.endings.raised import message_of
from shardproof.engines.calling import ONCE

# Messages for a function without a second derivative: torch's, the message of `first_derivative_only`, and the message
# of a reentrant checkpoint.
FIRST_ONLY = (
    *ONCE, "differentiate twice", "cannot be differentiated again", "is not implemented", "does not require grad",
    "compatible with .grad()",
)  # fmt: skip


@dataclass(frozen=True)
class SecondDerivative:
    """A rank's terms of <g, v> and of <h, c>, and the sum of their absolute values."""

    by_gradients: float
    by_cotangents: float
    size: float


def terms(
    outputs: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    cotangents: Mapping[str, torch.Tensor],
    directions: Mapping[str, torch.Tensor],
    shares: Sequence[Mapping[str, float]],
) -> SecondDerivative | None:
    """A rank's terms; None if the gradient cannot be differentiated.

    `directions` maps input names to v. `shares` are two maps from names to factors: for the terms of the inputs, and
    for the terms of the outputs.
    """
    leaves = {name: cotangent.detach().requires_grad_() for name, cotangent in cotangents.items()}
    try:
        found = torch.autograd.grad(
            list(outputs.values()), list(inputs.values()), list(leaves.values()), create_graph=True, allow_unused=True
        )
        gradients = {name: g for name, g in zip(inputs, found, strict=True) if g is not None}
        products = {name: g * directions[name] for name, g in gradients.items()}
        total = torch.stack([product.sum() for product in products.values()]).sum() if products else None
        if total is None or not total.requires_grad:
            return None
        of_cotangents = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if any(words in message_of(error) for words in FIRST_ONLY):
            return None
        raise
    if any(h is None for h in of_cotangents):  # the graph ends at a node of `once_differentiable`
        return None
    tangents = {name: h * leaves[name] for name, h in zip(leaves, of_cotangents, strict=True)}
    both = [
        [product.detach() * factors[name] for name, product in each.items()]
        for each, factors in zip((products, tangents), shares, strict=True)
    ]
    by_gradients, by_cotangents = (sum(product.sum().item() for product in each) for each in both)
    size = sum(product.abs().sum().item() for each in both for product in each)
    return SecondDerivative(by_gradients, by_cotangents, size)


def shares(arguments: Iterable[Argument], mesh: Mapping[str, int]) -> dict[str, float]:
    """The factor of a rank's term, by tensor: 1 / n, where n is the number of copies along its invariant axes."""
    return {
        arg.name: 1 / math.prod(mesh[axis] for axis, letter in arg.spec.types if letter == "I") for arg in arguments
    }


def imbalance(of_ranks: Sequence[SecondDerivative | None], unit_roundoff: float, budget: float) -> str | None:
    """The sentence on a wrong second derivative; None if it is right, not finite, or not defined.

    `budget` is the largest error that rounding may cause in one of the sums, for example if a gradient's terms cancel.
    """
    found = [each for each in of_ranks if each is not None]
    if len(found) < len(of_ranks) or not found:
        return None
    # Not by math.fsum, which raises an error for two infinities of opposite signs.
    gradients, cotangents, size = (
        sum(getattr(each, name) for each in found) for name in ("by_gradients", "by_cotangents", "size")
    )
    # Rounding errors are far smaller than the root of the roundoff, and the error of a wrong sum is far larger.
    if not math.isfinite(size) or abs(gradients - cotangents) <= math.sqrt(unit_roundoff) * size + 2 * budget:
        return None
    return (
        f"the second derivative is wrong: the gradient times a direction is {gradients:.6g} over all ranks, and its "
        f"derivative with respect to the cotangents times the cotangents is {cotangents:.6g}; a gradient is linear in "
        "the cotangents, so both numbers should be equal"
    )
