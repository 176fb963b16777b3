"""Traces with infinities and NaN: tensors are equal only if these are in the same places."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from shardproof.tracing import Pair, first, trace_pair

WEIGHT = torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=torch.float64)
X = torch.tensor([[1.0, 3.0], [2.0, -1.0]], dtype=torch.float64)  # one of its products with WEIGHT is -2


class Rooted(nn.Module):
    """A linear map, followed by a function."""

    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(2, 2, bias=False, dtype=torch.float64), function
        with torch.no_grad():
            self.fc.weight.copy_(WEIGHT)

    def forward(self, x):
        return self.function(self.fc(x))


class FlaxRooted(nnx.Module):
    def __init__(self, weights, function):
        self.fc, self.function = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)), function
        self.fc.kernel = nnx.Param(jnp.asarray(weights["fc.weight"]).T)

    def __call__(self, x):
        return self.function(self.fc(x))


def lines(ours, theirs):
    return trace_pair(Pair(Rooted(ours), lambda weights: FlaxRooted(weights, theirs), (X.numpy(),)))


def positive_root(y):
    return torch.where(y > 0, y.clamp_min(1.0).sqrt(), 0.0)


def masked(y):
    return torch.where(y > 0, y, -torch.inf)


def test_a_gradient_is_nan_in_the_reference_only():
    compared = lines(positive_root, lambda y: jnp.where(y > 0, jnp.sqrt(jnp.maximum(y, 1.0) * jnp.sign(y)), 0.0))
    line = first(compared)
    assert line is not None and line.phase == "backward"


def test_infinities_in_the_same_places_are_equal():
    assert first(lines(masked, lambda y: jnp.where(y > 0, y, -jnp.inf))) is None


@pytest.mark.parametrize("filled", [0.0, np.inf, np.nan])
def test_infinities_in_other_places_are_a_mismatch(filled):
    line = first(lines(masked, lambda y: jnp.where(y > 0, y, filled)))
    assert line is not None and line.phase == "forward"


def test_a_reference_without_a_finite_number_compares_nothing():
    line = first(lines(lambda y: y * torch.nan, lambda y: y * jnp.nan))
    assert line is not None
    assert line.notes == ("the reference is not finite here, so that nothing can be compared",)
