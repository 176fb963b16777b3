"""Parity of rotary positions and of a mixture of experts whose experts are all on this rank."""

import torch
from hypothesis import given, settings
from torch.func import functional_call

from jax_ref.expert_parallel import mixture, softmax_top_k
from jax_ref.models import rotated as reference
from shardproof import check, check_cases, every_case, integers, scheme, values
from torch_impl.models import HybridConfig
from torch_impl.models.layers import Moe, rotated


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


def all_experts(x, router, gate_up, down, k):
    tokens = x.reshape(-1, x.shape[-1])
    gates, experts, _ = softmax_top_k(tokens @ router.T, k, norm_topk_prob=True)
    return mixture(tokens, gates, experts, gate_up.transpose(0, 3, 1, 2), down.transpose(0, 2, 1)).reshape(x.shape)


@scheme(
    reference=all_experts,
    mesh={"dp": (1, 2)},
    inputs={"x": "b/dp s d", "router": "e d dp=R", "gate_up": "e two f d dp=R", "down": "e d f dp=R"},
    outputs="b/dp s d",
    dims={"b": (2,), "s": (1, 5), "d": (4, 3), "e": (4, 3), "f": (6, 4), "two": (2,)},
    draw={name: values("normal") for name in ("x", "router", "gate_up", "down")},
    options={"k": (1, 2, 3)},
    dtypes=("float32", "bfloat16", "float64"),
    roundings=8,
    reduction=("s", "d", "f"),
)
def layer_of_experts(mesh, x, router, gate_up, down, k):
    e, d, f = down.shape
    config = HybridConfig(hidden_size=d, num_experts=e, num_experts_per_tok=k, moe_intermediate_size=f)
    weights = {
        "router.weight": router,
        "experts.gate_up_proj": gate_up.flatten(1, 2),
        "experts.down_proj": down,
    }
    return functional_call(Moe(config, device="meta", dtype=x.dtype), weights, (x,), strict=True)


def test_parity_of_experts():
    check_cases(layer_of_experts, 30)


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
