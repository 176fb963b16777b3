"""Rows cut over ranks, or columns cut over ranks: the same matrix."""

from jaxtyping import Array, Shaped


def same(matrix: Shaped[Array, "t v"]) -> Shaped[Array, "t v"]:
    """The matrix."""
    return matrix
