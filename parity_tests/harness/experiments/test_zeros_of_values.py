"""Zeros that come from tiny values, and zeros because nothing reaches a tensor."""

import jax
import pytest
import torch

from parity_tests.specimens.noted_scheme import notes_on_case

TINY = {"x": {"kind": "tiny"}, "w": {"kind": "tiny"}}


def product(x, w):
    return torch.relu(x * w)


def without_gradient(x, w):
    return torch.relu(x * w).detach() + 0.0 * x.detach() * w


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (product, "right with normal values; gradient is zero with x tiny and w tiny"),
        (without_gradient, "gradient is zero: backward does not reach this input"),
    ],
)
def test_a_product_of_tiny_numbers_is_zero_and_so_is_its_derivative(function, note):
    """A half of the products has a derivative that is not 0, in float64."""
    notes = notes_on_case(
        lambda mesh, x, w: function(x, w), lambda x, w: jax.nn.relu(x * w), {"x": "b/tp d", "w": "b/tp d"}, "b/tp d",
        {"tp": 2, "b": 4, "d": 8}, kinds=TINY, nograd=("x",),
    )  # fmt: skip
    assert notes["d/d w"][0].startswith(note)
