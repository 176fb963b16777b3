"""Parity of the balance losses, over all tokens, of each sequence and of each rank, each as what it is; and loads."""

import jax
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from jax_ref import expert_parallel as reference
from parity_tests.expert_parallel.choices import chosen_experts
from parity_tests.expert_parallel.expert_module import over_all
from parity_tests.harness.run.engines import run
from shardproof import CaseSpec, Cost, check_cases, scheme, values
from torch_impl import expert_parallel

SIZES = {"k": (1, 2, 3), "e": (4, 8, 3)}
INT64 = 8
DECLARED = dict(
    dims=SIZES,
    draw={"probabilities": values("probabilities", "uniform", "zeros", "normal"), "experts": chosen_experts()},
    dtypes=("float32", "bfloat16", "float64"),
)


def sizes_of(x):
    return x.shape[-1]


def real_tokens(probabilities, experts):
    """Choices of no expert would make the share of a token's choices smaller: they become the first's or the last's."""
    return probabilities, experts % probabilities.shape[-1]


def of_all_tokens(probabilities, experts):
    return reference.balance_loss(*real_tokens(probabilities, experts))


@scheme(
    reference=of_all_tokens,
    mesh={"dp": (1, 2), "cp": (1, 2), "ep": (1, 2, 3)},
    contract=expert_parallel.global_balance_loss,
    inputs={"probabilities": "t/dp/cp/ep e", "experts": "t/dp/cp/ep k"},
    reduction=("t", "e"),
    **DECLARED,
)
def balance_over_three_axes(mesh, probabilities, experts: Int[Tensor, "t k"]):
    data = over_all(mesh, ("dp", "cp", "ep"))
    return expert_parallel.global_balance_loss(probabilities, experts % probabilities.shape[-1], data)


@scheme(
    reference=of_all_tokens,
    mesh={"data": (1, 2, 3, 4, 5, 7)},
    contract=expert_parallel.global_balance_loss,
    inputs={"probabilities": "t/data:ragged e", "experts": "t/data:ragged k"},
    reduction=("t", "e"),
    cost=lambda c: Cost(forward={"all_reduce": (1, INT64 * c.e)}),
    **DECLARED,
)
def balance_of_all_tokens(mesh, probabilities, experts: Int[Tensor, "t k"]):
    return expert_parallel.global_balance_loss(probabilities, experts % probabilities.shape[-1], mesh["data"])


def of_sequences(probabilities, experts):
    return reference.sequence_balance_loss(*real_tokens(probabilities, experts))


@scheme(
    reference=of_sequences,
    mesh={"dp": (1, 2), "cp": (1, 2, 3, 4)},
    contract=expert_parallel.sequence_balance_loss,
    inputs={"probabilities": "b/dp s/cp:dual_chunk_swap e", "experts": "b/dp s/cp:dual_chunk_swap k"},
    reduction=("s", "e"),
    cost=lambda c: Cost(forward={"all_reduce/cp": (1, INT64 * c.b // c.dp * c.e)}),
    **DECLARED,
)
def balance_of_each_sequence(mesh, probabilities, experts: Int[Tensor, "b s k"]):
    return expert_parallel.sequence_balance_loss(probabilities, experts % probabilities.shape[-1], mesh["cp"])


def of_ranks(probabilities, experts, mesh):
    """The rule is per rank: the tokens of each by themselves."""
    by_rank = [x.reshape(mesh["data"], -1, x.shape[-1]) for x in real_tokens(probabilities, experts)]
    return jax.vmap(reference.balance_loss)(*by_rank)


@scheme(
    reference=of_ranks,
    mesh={"data": (1, 2, 3)},
    inputs={"probabilities": "t/data e", "experts": "t/data k"},
    outputs="r/data",
    reduction=("t", "e"),
    cost=lambda c: Cost(),
    **{**DECLARED, "dims": {**SIZES, "r": "data"}},
)
def balance_of_each_rank(mesh, probabilities, experts: Int[Tensor, "t k"]):
    return expert_parallel.rank_balance_loss(probabilities, experts % probabilities.shape[-1])[None]


@scheme(
    reference=reference.z_loss,
    mesh={"data": (1, 2, 3, 4, 5, 7)},
    contract=expert_parallel.z_loss,
    inputs={"logits": "t/data:ragged e"},
    draw={"logits": values("normal", "ties", "zeros", "huge", "peaked")},
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("t", "e"),
    cost=lambda c: Cost(),
)
def z_loss_of_all_tokens(mesh, logits):
    return expert_parallel.z_loss(logits, mesh.total("t"))


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
    """The loads that a bias follows are those of every rank with other tokens, dp x cp x ep: a group that is no axis,
    so that no cost can name it."""
    counts = expert_parallel.load_counts(experts, len(bias), over_all(mesh, ("dp", "cp", "ep")))
    return expert_parallel.balanced_bias(bias, counts, rate)


SCHEMES = (
    balance_over_three_axes,
    balance_of_all_tokens,
    balance_of_each_sequence,
    balance_of_each_rank,
    z_loss_of_all_tokens,
    loads_of_all_ranks,
    bias_of_all_loads,
)


@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared):
    check_cases(declared, 30)


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


def test_ranks_without_tokens_have_no_share():
    empty = torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64)
    assert expert_parallel.rank_balance_loss(*empty) == 0.0
    assert loss_of_ranks(torch.full((1, 2), 0.5), torch.tensor([[0, 1]]), 1) == ((1.0, 1.0),)
