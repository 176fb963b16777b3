"""A sum over repeated indices, such as the gradient of an embedding, may round after each term.

Libraries accumulate sums over a dim in float32, also in 16-bit code. But they may add the rows of one index one after
another in the dtype of the tensor: torch does so in the gradient of `weight[ids]` and of `embedding` on a CPU, and
wherever a GPU adds atomically. No line of the code under test asks for this.

Terms x_1 ... x_n have the partial sums S_j. Each addition is off by u |S_j| at most; in a random order of the terms
the mean of S_j^2 over j is about S_n^2 / 3 + sum(x_i^2) / 6, and the errors add up to at most

    u (n - 1) sqrt(S_n^2 / 3 + sum(x_i^2) / 6)

This is a bound, which also holds if the sum is so large that another term changes nothing. A budget is K times the root
mean square of the errors, so here the bound divided by K stands for the root mean square.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardproof.judge.step import Rule
from shardproof.judge.storage import K


def adds_by_index(equation: Any) -> bool:
    return equation.primitive.name == "scatter-add"


def additions_of(rule: Rule, equation: Any, nested: Any, xp: Any) -> Callable[..., Any]:
    """A function (result, operand, indices, updates) -> the bound divided by K, for u = 1."""
    add, _ = rule(equation, (False, False, False), nested)

    def size(result: Any, operand: Any, indices: Any, updates: Any) -> Any:
        zeros, none = xp.zeros_like(operand), (None, None, None)
        (terms,), _ = add((zeros, indices, xp.ones_like(updates)), none)
        (squares,), _ = add((zeros, indices, updates * updates), none)
        return xp.maximum(terms - 1.0, 0.0) * xp.sqrt(result * result / 3.0 + squares / 6.0) / K

    return size
