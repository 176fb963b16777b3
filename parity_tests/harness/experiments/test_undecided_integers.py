"""Between two positions of a maximum there is none: integers of a reference that jumps are choices, and no range."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from shardproof import scheme
from shardproof.experiments.undecided import verify_or_undecided

V = 8


def largest_at(*places):
    def draw(generator, shape):
        return np.where(np.isin(np.arange(shape[-1]), places), 1.0, generator.uniform(0.0, 0.5, shape))

    return draw


def position(function, draw):
    def fn(mesh, x) -> Int[Tensor, "b/tp"]:
        return function(x == x.amax(-1, keepdim=True))

    return scheme(
        reference=lambda x: jnp.argmax(x, -1), mesh={"tp": (1, 2)}, inputs={"x": "b/tp v"}, outputs="b/tp",
        dims={"v": (V,)}, draw={"x": draw}, dtypes=("float32",), nograd=("x",),
    )(fn)  # fmt: skip


def last(is_largest):
    return V - 1 - is_largest.int().flip(-1).argmax(-1)


def mean(is_largest):
    return (is_largest * torch.arange(V)).sum(-1) // is_largest.sum(-1)


@pytest.mark.parametrize("tied", [(0, 5), (0, 2, 7)])
@pytest.mark.parametrize(("function", "verdict"), [(last, "undecided"), (mean, "mismatch")])
def test_a_position_between_two_equal_maxima_is_wrong(function, verdict, tied):
    declaration = position(function, largest_at(*tied))
    assert verify_or_undecided(declaration, declaration.case(tp=2, b=4)).verdict == verdict
    declaration = position(function, largest_at(tied[0]))
    assert verify_or_undecided(declaration, declaration.case(tp=2, b=4)).ok


@pytest.mark.parametrize("seed", range(3))
def test_a_count_of_equal_maxima_may_have_any_number_in_the_range(seed):
    """Each of many rows may count for either of two places."""
    takes_first = torch.tensor(np.random.default_rng(seed).random(24) < 0.3)

    def fn(mesh, x) -> Int[Tensor, "v"]:
        places = torch.where(takes_first, x.argmax(-1), V - 1 - x.flip(-1).argmax(-1))
        return (places[:, None] == torch.arange(V)).sum(0)

    declaration = scheme(
        reference=lambda x: (jnp.argmax(x, -1)[:, None] == jnp.arange(V)[None]).sum(0),
        mesh={"tp": (1,)}, inputs={"x": "b v tp=I"}, outputs="v",
        dims={"v": (V,), "b": (24,)}, draw={"x": largest_at(2, 5)}, dtypes=("float32",), nograd=("x",),
    )(fn)  # fmt: skip
    assert verify_or_undecided(declaration, declaration.case(tp=1, b=24)).verdict in ("undecided", "equal")
