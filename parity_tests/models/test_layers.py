"""Parity of models.rotary."""

import torch
from hypothesis import given, settings

from jax_ref.models import rotated as reference
from shardproof import check, every_case, integers, scheme, values
from torch_impl.models.layers import rotated


def at_base(x, places, base):
    return reference(x, places, base)


@scheme(
    reference=at_base,
    mesh={"cp": (1, 2, 3)},
    inputs={"x": "b h s/cp p", "places": "s/cp"},
    outputs="b h s/cp p",
    dims={"b": (2,), "h": (3,), "s": (6,), "p": (2, 8)},
    draw={"x": values("normal", "ties", "large"), "places": integers(0, 4095)},
    options={"base": (10000.0, 10.0)},
    dtypes=("float32", "bfloat16", "float64"),
)
def rotary(mesh, x, places, base):
    return rotated(x, places, base)


@settings(max_examples=20)
@given(every_case(rotary))
def test_parity(case):
    check(case)


def test_a_score_knows_the_distance_alone():
    """Turning both by as much again changes no digit that float64 keeps of an angle of thousands."""
    q, k = torch.linspace(-1, 2, 8, dtype=torch.float64).view(2, 1, 1, 1, 4)
    far = torch.arange(0, 3000, 500)
    near_pair = (rotated(q, torch.tensor([7]), 10.0) * rotated(k, torch.tensor([3]), 10.0)).sum()
    moved = torch.stack([(rotated(q, 7 + each[None], 10.0) * rotated(k, 3 + each[None], 10.0)).sum() for each in far])
    assert moved.round(decimals=9).tolist() == [near_pair.round(decimals=9).item()] * len(far)


def test_place_zero_turns_nothing():
    x = torch.linspace(-1, 2, 8).view(1, 1, 1, 8)
    assert torch.equal(rotated(x, torch.tensor([0]), 10000.0), x)
