"""Parity of the routers: gates, choices and probabilities."""

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from jax_ref import expert_parallel as reference
from parity_tests.parity import parity
from shardproof import Cost, drawn, integers, scheme, values
from torch_impl import expert_parallel

Routing = tuple[Float[Tensor, "t k"], Int[Tensor, "t k"], Float[Tensor, "t e"]]
# The dim k of the results comes with an input that carries it.
TOKENS = dict(
    wide=True,
    mesh={"ep": (1, 2)},
    outputs=("t/ep k", "t/ep k", "t/ep e"),
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("e",),
    cost=lambda c: Cost(),
)
LOGITS = values("normal", "ties", "zeros", "peaked", "normal")
SIZES = {"k": (1, 2, 3), "e": (4, 8, 3)}


def by_softmax(logits, each, norm_topk_prob):
    return reference.softmax_top_k(logits, len(each), norm_topk_prob)


@scheme(
    reference=by_softmax,
    contract=expert_parallel.softmax_top_k,
    inputs={"logits": "t/ep e", "each": "k"},
    draw={"logits": LOGITS, "each": integers(0, 0)},
    dims=SIZES,
    options={"norm_topk_prob": (False, True)},
    nograd=("each",),
    sums="float32",
    **TOKENS,
)
def routed_by_softmax(mesh, logits, each: Int[Tensor, "k"], norm_topk_prob) -> Routing:
    return expert_parallel.softmax_top_k(logits, len(each), norm_topk_prob=norm_topk_prob)


def by_top_k(logits, each):
    return reference.top_k_softmax(logits, len(each))


@scheme(
    reference=by_top_k,
    contract=expert_parallel.top_k_softmax,
    inputs={"logits": "t/ep e", "each": "k"},
    draw={"logits": LOGITS, "each": integers(0, 0)},
    dims=SIZES,
    nograd=("each",),
    sums="float32",
    **TOKENS,
)
def routed_by_top_k(mesh, logits, each: Int[Tensor, "k"]) -> Routing:
    return expert_parallel.top_k_softmax(logits, len(each))


def biases(generator, shape):
    """Equal ones, integers, or such that scores of chosen groups are below 0 too; all have few digits."""
    kind = generator.integers(4)
    normal = generator.standard_normal(shape)
    return 0.0 * normal - 2.0 if kind == 0 else np.rint(normal) if kind == 1 else np.rint(8 * normal) / 8 - 2.0


GROUPS = ((1, 1), (2, 1), (4, 2), (4, 3), (8, 4))


def by_sigmoid(logits, bias, each, searched, norm_topk_prob, routed_scaling_factor):
    groups, chosen = searched
    options = dict(norm_topk_prob=norm_topk_prob, routed_scaling_factor=routed_scaling_factor)
    return reference.sigmoid_top_k(logits, bias, len(each), groups=groups, chosen_groups=chosen, **options)


@scheme(
    reference=by_sigmoid,
    contract=expert_parallel.sigmoid_top_k,
    inputs={"logits": "t/ep e", "bias": "e ep=R", "each": "k"},
    draw={
        "logits": values("normal", "ties", "zeros", "normal"),
        "bias": biases,
        "each": integers(0, 0),
    },
    dims={"k": (1, 2, 4), "e": (8, 16)},
    options={"searched": GROUPS, "norm_topk_prob": (True, False), "routed_scaling_factor": (1.0, 2.5)},
    rank_options={"is_narrow": (True, False)},
    nograd=("each", "bias"),
    wider_inputs=("logits", "bias"),
    sums="float32",
    assume=lambda case: case.k <= case.e // case.searched[0] * case.searched[1],
    **TOKENS,
)
def routed_by_sigmoid(
    mesh, logits, bias, each: Int[Tensor, "k"], searched, norm_topk_prob, routed_scaling_factor, is_narrow
) -> Routing:
    """A bias may have fewer digits than the logits. bfloat16 has all digits of a drawn one, and not those of a sum."""
    groups, chosen = searched
    options = dict(norm_topk_prob=norm_topk_prob, routed_scaling_factor=routed_scaling_factor)
    bias = bias.bfloat16() if is_narrow and logits.dtype != torch.bfloat16 else bias
    return expert_parallel.sigmoid_top_k(logits, bias, len(each), groups=groups, chosen_groups=chosen, **options)


def close_loads(rng, shape):
    """Counts that differ by a few, of few tokens or of more than float32 can count."""
    return rng.choice([0, 2**26]) + rng.integers(0, 7, shape)


@scheme(
    reference=reference.balanced_bias,
    mesh={"ep": (1, 2)},
    contract=expert_parallel.balanced_bias,
    inputs={"bias": "e ep=R", "counts": "e"},
    outputs="e ep=R",
    draw={"bias": values("normal", "zeros"), "counts": drawn(close_loads, integer=True)},
    nograd=("bias",),
    options={"rate": (0.001, 0.5)},
    dtypes=("float32", "float64"),
    cost=lambda c: Cost(),
)
def bias_of_the_next_step(mesh, bias, counts: Int[Tensor, "e"], rate) -> Float[Tensor, "e"]:
    return expert_parallel.balanced_bias(bias, counts, rate)


SCHEMES = (routed_by_softmax, routed_by_top_k, routed_by_sigmoid, bias_of_the_next_step)
test_parity = parity(SCHEMES, lockstep=None)


def test_normalised_probabilities_are_the_softmax_of_the_chosen():
    """Mixtral and Qwen3-MoE say the same in two ways."""
    logits = torch.linspace(-2, 3, 40, dtype=torch.float64).sin().mul(9).view(5, 8)
    first, second = (
        expert_parallel.softmax_top_k(logits, 3, norm_topk_prob=True),
        expert_parallel.top_k_softmax(logits, 3),
    )
    assert torch.equal(first[1], second[1])
    assert (first[0] - second[0]).abs().max() <= 4 * torch.finfo(torch.float64).eps


def test_of_equal_scores_the_lower_expert_comes_first():
    for route in (expert_parallel.softmax_top_k, expert_parallel.top_k_softmax):
        assert route(torch.zeros(2, 300), 5)[1].tolist() == [[0, 1, 2, 3, 4]] * 2
    grouped = expert_parallel.sigmoid_top_k(torch.zeros(2, 300), torch.zeros(300), 5, groups=100, chosen_groups=2)
    assert grouped[1].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_leading_dims_match_the_logits():
    logits = torch.linspace(-2, 3, 48).sin().view(2, 3, 8)
    for route in (expert_parallel.softmax_top_k, expert_parallel.top_k_softmax):
        flat = route(logits.view(6, 8), 2)
        assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(route(logits, 2), flat, strict=True))


def test_a_bias_changes_the_choice_and_no_gate():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 9.0], requires_grad=True)
    gates, experts, _ = expert_parallel.sigmoid_top_k(logits, bias, 2, norm_topk_prob=False)
    assert experts.tolist() == [[2, 0]] and torch.equal(gates, logits[:, [2, 0]].sigmoid())
    assert not gates.requires_grad


def test_a_narrow_bias_leaves_scores_their_digits():
    """Scores that a bfloat16 beside 4 cannot tell apart."""
    logits, bias = torch.tensor([[0.0, 0.01, 0.02, 0.03]]), torch.full((4,), 4.0, dtype=torch.bfloat16)
    assert expert_parallel.sigmoid_top_k(logits, bias, 2)[1].tolist() == [[3, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gates_are_in_float32_or_wider(dtype):
    logits = torch.linspace(-2, 3, 40).sin().view(5, 8).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    routes = (
        expert_parallel.softmax_top_k(logits, 2),
        expert_parallel.top_k_softmax(logits, 2),
        expert_parallel.sigmoid_top_k(logits, torch.zeros(8), 2),
    )
    assert [[x.dtype for x in route] for route in routes] == [[wide, torch.int64, wide]] * 3
