"""A sum over repeated indices, such as the gradient of an embedding, may round after each term.

Sums over a dim run in float32, also in 16-bit code: libraries accumulate them so. Rows of one index they may add one
after another in the dtype of the tensor: torch does in the gradient of `weight[ids]` and of `embedding` on a CPU, and
wherever a GPU adds atomically. No line of the code under test asks for it.

Terms x_1 ... x_n have the partial sums S_j. Each addition is off by u |S_j| at most; in a random order of the terms
the mean of S_j^2 over j is about S_n^2 / 3 + sum(x_i^2) / 6, and the errors add up to at most

    u (n - 1) sqrt(S_n^2 / 3 + sum(x_i^2) / 6)

This is a bound, which also holds where the sum is so large that another term changes nothing. Budgets are K root mean
squares of the errors, so that 1 / K of it is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardproof.judge.step import Rule
from shardproof.judge.storage import K


def adds_by_index(equation: Any) -> bool:
    return equation.primitive.name == "scatter-add"


def additions_of(rule: Rule, equation: Any, nested: Any, xp: Any) -> Callable[..., Any]:
    """(result, operand, indices, updates) -> 1 / K of the bound, for u = 1."""
    add, _ = rule(equation, (False, False, False), nested)

    def size(result: Any, operand: Any, indices: Any, updates: Any) -> Any:
        zeros, none = xp.zeros_like(operand), (None, None, None)
        (terms,), _ = add((zeros, indices, xp.ones_like(updates)), none)
        (squares,), _ = add((zeros, indices, updates * updates), none)
        return xp.maximum(terms - 1.0, 0.0) * xp.sqrt(result * result / 3.0 + squares / 6.0) / K

    return size
