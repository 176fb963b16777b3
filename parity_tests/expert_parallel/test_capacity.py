"""Parity of the rules of who is dropped, over all tokens in their order and of each rank by itself."""

from fractions import Fraction

import jax
import pytest
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from jax_ref.expert_parallel import kept_by_position, kept_by_probability, mixture
from parity_tests.expert_parallel.choices import chosen_experts
from parity_tests.parity import parity
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from torch_impl.expert_parallel import expert_capacity, kept_choices, routed_experts

SIZES = {"k": (1, 2, 3), "e": (4, 8, 3)}
RANKS = (1, 2, 3, 4, 5, 7)
INT64 = 8
CAPACITIES = (1, 2, 3, 0, 8)
DECLARED = dict(
    dims=SIZES,
    draw={"gates": values("normal", "ties", "zeros", "uniform"), "experts": chosen_experts()},
    dtypes=("float32", "bfloat16", "float64"),
    nograd=("gates", "logits"),
    ties="ordered",
)


def by_rule(experts, gates, size, capacity, by):
    if by == "position":
        return kept_by_position(experts, size, capacity)
    return kept_by_probability(experts, gates, size, capacity)


def of_all(experts, gates, logits, capacity, by):
    return by_rule(experts, gates, len(logits), capacity, by)


def sent(c, axis, longest):
    """Counts by position; experts and gates of the longest shard, and its length, by probability."""
    counted = 1 if c.mesh[axis] > 1 else 0
    if c.by == "position":
        return Cost(forward={f"all_gather/{axis}": (counted, counted * INT64 * c.e)})
    return Cost(forward={f"all_gather/{axis}": (2 + counted, counted * INT64 + longest * c.k * (INT64 + c.itemsize))})


@scheme(
    reference=of_all,
    mesh={"ranks": RANKS},
    contract=kept_choices,
    inputs={"experts": "t/ranks:ragged k", "gates": "t/ranks:ragged k", "logits": "e ranks=R"},
    outputs="t/ranks:ragged k",
    options={"capacity": CAPACITIES, "by": ("position", "probability")},
    cost=lambda c: sent(c, "ranks", max(c.layouts["t/ranks"]["lengths"])),
    **{**DECLARED, "dims": {**SIZES, "t": (5, 40, 2, 9)}},  # torch sorts more than 16 in another way
)
def kept_of_all_tokens(mesh, experts: Int[Tensor, "t k"], gates, logits, capacity, by) -> Bool[Tensor, "t k"]:
    return kept_choices(experts, gates, len(logits), capacity, mesh["ranks"], by=by)


def of_each_rank(experts, gates, logits, capacity, by, mesh):
    """The rule is per rank: each has the capacity for its own tokens."""
    e, g = (x.reshape(mesh["ranks"], -1, x.shape[-1]) for x in (experts, gates))
    return jax.vmap(lambda e, g: by_rule(e, g, len(logits), capacity, by))(e, g).reshape(experts.shape)


@scheme(
    reference=of_each_rank,
    mesh={"ranks": (1, 2, 3), "one": (1,)},
    contract=kept_choices,
    inputs={"experts": "t/ranks k", "gates": "t/ranks k one=R", "logits": "e ranks=R one=R"},
    options={"capacity": CAPACITIES, "by": ("position", "probability")},
    cost=lambda c: sent(c, "one", c.t // c.ranks),
    **DECLARED,
)
def kept_of_each_rank(mesh, experts: Int[Tensor, "t k"], gates, logits, capacity, by) -> Bool[Tensor, "t k"]:
    return kept_choices(experts, gates, len(logits), capacity, mesh["one"], by=by)


def mixture_of_kept(x, gates, experts, gate_up, down, factor, by):
    capacity = -(-Fraction(factor) * experts.size // len(down))  # the mean load, times the factor, rounded up
    return mixture(x, gates, experts, gate_up, down, by_rule(experts, gates, len(down), int(capacity), by))


@scheme(
    reference=mixture_of_kept,
    mesh={"ep": RANKS},
    contract=routed_experts,
    inputs={
        "x": "t/ep:ragged d",
        "gates": "t/ep:ragged k",
        "experts": "t/ep:ragged k",
        "gate_up": "e/ep d two f",
        "down": "e/ep f d",
    },
    outputs="t/ep:ragged d",
    options={"factor": (0.5, 1.0, 0.25, 1.5), "by": ("position", "probability")},
    rank_options={"exchange": ("all_to_all", "all_gather")},
    dims={"k": (1, 2), "e": "h*ep", "h": (4, 1, 2), "d": (4,), "f": (4,), "two": (2,)},
    draw={**dict.fromkeys(("x", "gates", "gate_up", "down"), values("normal", "ties")), "experts": chosen_experts()},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("k", "d", "f"),
    roundings=6,
    assume=lambda c: c.k <= c.e,
)
def routed_with_capacity(mesh, x, gates, experts: Int[Tensor, "t k"], gate_up, down, factor, by, exchange):
    ep, e = mesh["ep"], mesh.total("e")
    capacity = expert_capacity(mesh.total("t"), experts.shape[1], e, factor)
    kept = kept_choices(experts, gates, e, capacity, ep, by=by)
    return routed_experts(x, gates, experts, gate_up.flatten(2), down, ep, kept=kept, exchange=exchange)


SCHEMES = (kept_of_all_tokens, kept_of_each_rank, routed_with_capacity)
test_parity = parity(SCHEMES, lockstep=40)


def kept_on(count, experts, gates, capacity, by):
    def body(mesh, case):
        own = (x.chunk(count)[mesh.rank("ranks")] for x in (experts, gates))
        return kept_choices(*own, 4, capacity, mesh["ranks"], by=by)

    return torch.cat(run(body, CaseSpec(scheme="kept", mesh={"ranks": count})).results)


@pytest.mark.parametrize("by", ["position", "probability"])
def test_a_global_rule_does_not_depend_on_the_ranks(by):
    experts = torch.tensor([[0, 1], [0, 2], [3, 0], [0, 1], [1, 0], [0, 3], [2, 0], [0, 1]])
    gates = torch.tensor([3, 7, 1, 8, 2, 5, 6, 4]).float()[:, None].expand(8, 2)
    for capacity in range(5):
        expected = kept_on(1, experts, gates, capacity, by)
        assert expected.sum() == sum(min(capacity, n) for n in (8, 4, 2, 2))
        assert all(torch.equal(kept_on(count, experts, gates, capacity, by), expected) for count in (2, 4))


@pytest.mark.parametrize(
    ("tokens", "k", "num_experts", "factor", "capacity"),
    [(8, 2, 4, 1.0, 4), (9, 2, 4, 1.0, 5), (8, 1, 4, 1.25, 3), (0, 2, 4, 1.0, 0), (100, 1, 1, 1.1, 110)],
)
def test_capacity_is_rounded_up(tokens, k, num_experts, factor, capacity):
    assert expert_capacity(tokens, k, num_experts, factor) == capacity
