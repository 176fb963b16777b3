"""Parity of three balance losses (over all tokens, of each sequence, of each rank), and of loads."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Int
from torch import Tensor

from jax_ref import expert_parallel as reference
from parity_tests.expert_parallel.choices import chosen_experts, padding
from parity_tests.expert_parallel.expert_module import over_all
from parity_tests.parity import parity
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.draw.inputs import full_array
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl import expert_parallel

WIDE_OUTPUTS = True
SIZES = {"k": (1, 2, 3), "e": (4, 8, 3)}
INT64 = 8
DECLARED = dict(
    dims=SIZES,
    draw={
        "probabilities": values("probabilities", "uniform", "zeros", "normal", nan_rows=padding),
        "experts": chosen_experts(),
    },
    dtypes=("float32", "bfloat16", "float64"),
)


@scheme(
    reference=reference.balance_loss,
    mesh={"dp": (1, 2), "cp": (1, 2), "ep": (1, 2, 3)},
    contract=expert_parallel.global_balance_loss,
    inputs={"probabilities": "t/dp/cp/ep e", "experts": "t/dp/cp/ep k"},
    reduction=("t", "e"),
    sums="float32",
    **DECLARED,
)
def balance_over_three_axes(mesh, probabilities, experts: Int[Tensor, "t k"]):
    data = over_all(mesh, ("dp", "cp", "ep"))
    return expert_parallel.global_balance_loss(probabilities, experts, data)


@scheme(
    reference=reference.balance_loss,
    mesh={"data": (1, 2, 3, 4, 5, 7)},
    contract=expert_parallel.global_balance_loss,
    inputs={"probabilities": "t/data:ragged e", "experts": "t/data:ragged k"},
    reduction=("t", "e"),
    sums="float32",
    cost=lambda c: Cost(forward={"all_reduce": (1, INT64 * (c.e + 1))}),
    **DECLARED,
)
def balance_of_all_tokens(mesh, probabilities, experts: Int[Tensor, "t k"]):
    return expert_parallel.global_balance_loss(probabilities, experts, mesh["data"])


@scheme(
    reference=reference.sequence_balance_loss,
    mesh={"dp": (1, 2), "cp": (1, 2, 3, 4)},
    contract=expert_parallel.sequence_balance_loss,
    inputs={"probabilities": "b/dp s/cp:dual_chunk_swap e", "experts": "b/dp s/cp:dual_chunk_swap k"},
    reduction=("s", "e"),
    sums="float32",
    cost=lambda c: Cost(forward={"all_reduce/cp": (1, INT64 * c.b // c.dp * (c.e + 1))}),
    **DECLARED,
)
def balance_of_each_sequence(mesh, probabilities, experts: Int[Tensor, "b s k"]):
    return expert_parallel.sequence_balance_loss(probabilities, experts, mesh["cp"])


def of_ranks(probabilities, experts, mesh):
    """The rule is per rank: the tokens of each by themselves."""
    by_rank = [x.reshape(mesh["data"], -1, x.shape[-1]) for x in (probabilities, experts)]
    return jax.vmap(reference.balance_loss)(*by_rank)


@scheme(
    reference=of_ranks,
    mesh={"data": (1, 2, 3)},
    inputs={"probabilities": "t/data e", "experts": "t/data k"},
    outputs="r/data",
    reduction=("t", "e"),
    sums="float32",
    cost=lambda c: Cost(),
    **{**DECLARED, "dims": {**SIZES, "r": "data"}},
)
def balance_of_each_rank(mesh, probabilities, experts: Int[Tensor, "t k"]):
    return expert_parallel.rank_balance_loss(probabilities, experts)[None]


OF_LOGITS = dict(
    mesh={"data": (1, 2, 3, 4, 5, 7)},
    contract=expert_parallel.z_loss,
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("t", "e"),
)
LOGITS = ("normal", "ties", "zeros", "huge", "peaked")


@scheme(
    reference=reference.z_loss,
    inputs={"logits": "t/data:ragged e"},
    draw={"logits": values(*LOGITS)},
    sums="float32",
    cost=lambda c: Cost(),
    **OF_LOGITS,
)
def z_loss_of_all_tokens(mesh, logits):
    return expert_parallel.z_loss(logits, mesh.total("t"))


@scheme(
    reference=reference.z_loss,
    inputs={"logits": "t/data:ragged e", "experts": "t/data:ragged k"},
    draw={"logits": values(*LOGITS, nan_rows=padding), "experts": chosen_experts()},
    sums="float32",
    dims=SIZES,
    cost=lambda c: Cost(forward={"all_reduce": (1, INT64)}),
    **OF_LOGITS,
)
def z_loss_without_padding(mesh, logits, experts: Int[Tensor, "t k"]):
    tokens = expert_parallel.token_count(experts, logits.shape[-1], mesh["data"])
    return expert_parallel.z_loss(logits, tokens, experts)


def loads(experts, logits):
    return reference.load_counts(experts, logits.shape[-1])


@scheme(
    reference=loads,
    mesh={"data": (1, 2, 4, 5, 7)},
    contract=expert_parallel.load_counts,
    inputs={"experts": "b s/data:ragged k", "logits": "e data=R"},
    draw={"experts": chosen_experts()},
    dims=SIZES,
    nograd=("logits",),
    dtypes=("float32",),
    cost=lambda c: Cost(forward={"all_reduce": (1, INT64 * c.e)}),
)
def loads_of_all_ranks(mesh, experts: Int[Tensor, "b s k"], logits) -> Int[Tensor, "e"]:
    return expert_parallel.load_counts(experts, len(logits), mesh["data"])


def bias_by_all_loads(experts, bias, rate):
    return reference.balanced_bias(bias, reference.load_counts(experts, len(bias)), rate)


@scheme(
    reference=bias_by_all_loads,
    mesh={"dp": (1, 2), "cp": (1, 2), "ep": (1, 2, 3)},
    inputs={"experts": "b/dp/ep s/cp k", "bias": "e dp=I cp=I ep=I"},
    outputs="e dp=I cp=I ep=I",
    draw={"experts": chosen_experts(), "bias": values("normal", "zeros")},
    dims=SIZES,
    nograd=("bias",),
    options={"rate": (0.001, 0.5)},
    dtypes=("float32", "float64"),
)
def bias_of_all_loads(mesh, experts: Int[Tensor, "b s k"], bias, rate):
    """A bias follows the loads of every rank with other tokens, dp x cp x ep: a group that is no axis of the mesh,
    so that no cost can name it."""
    counts = expert_parallel.load_counts(experts, len(bias), over_all(mesh, ("dp", "cp", "ep")))
    return expert_parallel.balanced_bias(bias, counts, rate)


SCHEMES = (
    balance_over_three_axes,
    balance_of_all_tokens,
    balance_of_each_sequence,
    balance_of_each_rank,
    z_loss_of_all_tokens,
    z_loss_without_padding,
    loads_of_all_ranks,
    bias_of_all_loads,
)
test_parity = parity(SCHEMES, lockstep=30)


@pytest.mark.parametrize("declared", [balance_of_each_sequence, z_loss_without_padding], ids=lambda each: each.name)
def test_nan_is_drawn_in_rows_of_padding_alone(declared):
    inputs_by_name = {arg.name: arg for arg in declared.inputs}
    (name,) = inputs_by_name.keys() - {"experts"}
    found = set()
    for seed in range(60):
        case = draw_case(declared, seeded_chooser(seed), {}, seed=seed, with_conditions=True)
        values_of = {each: full_array(arg, declared.draws[each], case) for each, arg in inputs_by_name.items()}
        has_no_expert = ~((values_of["experts"] >= 0) & (values_of["experts"] < case.e)).any(-1)
        is_nan = np.isnan(values_of[name])
        assert (is_nan.any(-1) == is_nan.all(-1)).all() and not (is_nan.all(-1) & ~has_no_expert).any()
        found |= {(bool(has_no_expert.any()), bool(is_nan.any()))}
    assert found == {(False, False), (True, False), (True, True)}


def loss_of_ranks(probabilities, experts, count):
    """Of each rank (its addend of the loss of all, its own loss)."""

    def body(mesh, case):
        rank = mesh.rank("data")
        p, e = (x.chunk(count)[rank] for x in (probabilities, experts))
        whole = expert_parallel.global_balance_loss(p, e, mesh["data"])
        return whole.item(), expert_parallel.rank_balance_loss(p, e).item()

    return run(body, CaseSpec(scheme="balance", mesh={"data": count})).results


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_loss_of_all_tokens_does_not_depend_on_the_ranks_and_a_mean_of_ranks_does(count):
    """Each half goes to experts of its own: all tokens are balanced, no rank is."""
    experts = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])[:, None]
    probabilities = torch.nn.functional.one_hot(experts[:, 0], 2).double()
    results = loss_of_ranks(probabilities, experts, count)
    assert sum(whole for whole, _ in results) == 1.0
    assert sum(own for _, own in results) / count == (1.0 if count == 1 else 2.0)


LOSSES = {
    "global": lambda x, experts, group: expert_parallel.global_balance_loss(x, experts, group),
    "sequence": lambda x, experts, group: expert_parallel.sequence_balance_loss(x[None], experts[None], group)[0],
    "rank": lambda x, experts, group: expert_parallel.rank_balance_loss(x, experts),
    "z": lambda x, experts, group: expert_parallel.z_loss(
        x, expert_parallel.token_count(experts, x.shape[-1], group), experts
    ),
}


def on_shards(loss, shards):
    """(the loss, the gradient of x) of each rank, which has the tokens of one (x, experts)."""

    def body(mesh, case):
        x, experts = shards[mesh.rank("data")]
        x = x.clone().requires_grad_()
        value = LOSSES[loss](x, experts, mesh["data"])
        value.backward()
        return value.item(), x.grad

    return run(body, CaseSpec(scheme="balance", mesh={"data": len(shards)})).results


@st.composite
def tokens_and_padding(draw):
    """(x, experts) of tokens, some without all of their k experts; and rows of padding, which may hold anything.

    Sums are exact: x is of eighths, or one eighth and -inf, so that log sum exp is that eighth.
    """
    t, m, e, k = (draw(st.integers(1, most)) for most in (4, 3, 4, 2))
    k = min(k, e)
    eighths = torch.tensor(draw(st.lists(st.integers(-16, 16), min_size=t * e, max_size=t * e))) / 8
    x = eighths.double().view(t, e)
    experts = torch.stack([torch.tensor(draw(st.permutations(range(e)))[:k]) for _ in range(t)])
    experts[:, 1:][torch.tensor(draw(st.lists(st.booleans(), min_size=t, max_size=t)))] = -1
    rows = torch.full((m, e), draw(st.sampled_from([0.0, 0.5, 100.0, torch.nan, torch.inf, -torch.inf])))
    ids = torch.full((m, k), draw(st.sampled_from([-1, -1, -100, e, e + 7])))
    return x, experts, rows.double(), ids


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=few(25))
@given(tokens_and_padding(), st.integers(0, 4), st.booleans())
def test_padding_changes_nothing_and_has_no_gradient(loss, drawn, place, on_a_rank_of_its_own):
    """Neither its number nor its values nor its place: before, between or behind the tokens, or alone on a rank."""
    x, experts, rows, ids = drawn
    if loss == "z":
        x = torch.where(torch.arange(x.shape[1]) == 0, x, -torch.inf)
    ((expected, gradient),) = on_shards(loss, [(x, experts)])
    if on_a_rank_of_its_own:
        (own, own_gradient), (other, of_padding) = on_shards(loss, [(x, experts), (rows, ids)])
        assert (own, other) == (expected, 0.0)
    else:
        order = torch.cat([torch.arange(len(x)), torch.full((len(rows),), -1)])
        order = torch.cat([order[place : len(x)], order[len(x) :], order[: min(place, len(x))]])
        placed = [torch.cat([tokens, padding[:1]])[order] for tokens, padding in ((x, rows), (experts, ids))]
        ((own, every),) = on_shards(loss, [placed])
        own_gradient, of_padding = torch.empty_like(x), every[order == -1]
        own_gradient[order[order >= 0]] = every[order >= 0]
        assert own == expected
    assert own_gradient.equal(gradient) and not gradient.isnan().any()
    assert of_padding.equal(torch.zeros_like(of_padding))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rows", [0, 3])
def test_without_a_token_the_loss_is_zero(loss, rows):
    nothing = torch.full((rows, 4), torch.nan, dtype=torch.float64), torch.full((rows, 2), -1)
    for value, gradient in on_shards(loss, [nothing, nothing]):
        assert value == 0.0 and gradient.equal(torch.zeros(rows, 4))


@pytest.mark.parametrize("loss", ["global", "sequence", "rank"])
def test_a_token_with_fewer_experts_counts_once_and_its_choices_as_they_are(loss):
    """Three tokens have the first expert and one of them the second: f is (3/4, 1/4), P the mean over the three."""
    experts = torch.tensor([[0, 1], [0, -1], [-1, 0], [-1, -1], [2, -1]])
    probabilities = torch.tensor([[4, 4], [1, 7], [1, 7], [9, 9], [9, 9]]).double() / 8
    ((value, gradient),) = on_shards(loss, [(probabilities, experts)])
    f, tokens = torch.tensor([3 / 4, 1 / 4]).double(), 3
    assert value == (2 * (f * probabilities[:3].sum(0)).sum() / tokens).item()
    assert gradient[3:].equal(torch.zeros(2, 2))
    assert gradient[:3].equal((2 * f / tokens).expand(3, 2))
