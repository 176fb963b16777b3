"""Parity of a training step: the gradient of each parameter, summed over the ranks that have other tokens for it."""

import jax.numpy as jnp
import pytest
import torch

from jax_ref import expert_parallel as reference
from parity_tests.expert_parallel.expert_module import BALANCE, Z, over_all, trained, trained_on_sequences
from parity_tests.parity import parity
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from torch_impl.expert_parallel import sum_gradients, sum_layer_gradients


def batch_loss(x, parameters, k):
    logits = x @ parameters["router"]["weight"]
    gates, experts, probabilities = reference.softmax_top_k(logits, k, norm_topk_prob=True)
    y = reference.mixture(x, gates, experts, **parameters["routed"]) + reference.swiglu(x, **parameters["shared"])
    balance, z = reference.balance_loss(probabilities, experts), reference.z_loss(logits)
    return jnp.mean(y**2) + BALANCE * balance + Z * z


def total_loss(x, parameters, k):
    """The sum of the losses of both micro-batches."""
    return batch_loss(x[0], parameters, k) + batch_loss(x[1], parameters, k)


EVERYWHERE = "edp=I ep=I tp=I"
PARAMETERS = {
    "router": {"weight": f"d e {EVERYWHERE}"},
    "routed": {"gate_up": "e/ep d two f/tp edp=I", "down": "e/ep f/tp d edp=I"},
    "shared": {"gate_up": "d two g/tp edp=I ep=I", "down": "g/tp d edp=I ep=I"},
}
NAMES = [f"parameters.{part}.{name}" for part, tensors in PARAMETERS.items() for name in tensors]


@scheme(
    reference=total_loss,
    mesh={"edp": (1, 2), "ep": (1, 2), "tp": (1, 2)},
    inputs={"x": "m t/edp/ep/tp d", "parameters": PARAMETERS},
    outputs="edp=P ep=P tp=P",
    dims={"m": (2,), "two": (2,), "e": (4, 8), "d": (4, 3), "f": (4,), "g": (4, 2)},
    draw=dict.fromkeys(("x", *NAMES), values("normal")),
    options={"k": (2, 1, 3)},
    rank_options={"exchange": ("all_to_all", "all_gather")},
    nograd=("x",),
    module="parameters",
    dtypes=("float32", "float64"),
    roundings=6,
    reduction=("t", "d", "e", "f"),
    excluded_conditions=("inference_mode", "autocast"),  # the router's product follows autocast
)
def step_of_expert_layer(mesh, x, parameters, k, exchange):
    return trained(mesh, x, parameters, k, exchange)


def total_sequence_loss(x, parameters, k):
    """The sum of the losses of both micro-batches [b, s, d], each with the mean balance loss of its sequences."""
    return sequence_batch_loss(x[0], parameters, k) + sequence_batch_loss(x[1], parameters, k)


def sequence_batch_loss(x, parameters, k):
    logits = x @ parameters["router"]["weight"]
    gates, experts, probabilities = reference.softmax_top_k(logits, k, norm_topk_prob=True)
    tokens, gates, chosen = (each.reshape(-1, each.shape[-1]) for each in (x, gates, experts))
    y = reference.mixture(tokens, gates, chosen, **parameters["routed"])
    balance = reference.sequence_balance_loss(probabilities, experts).mean()
    return jnp.mean(y**2) + BALANCE * balance + Z * reference.z_loss(logits)


ALL = "dp=I cp=I ep=I tp=I"
SEQUENCE_PARAMETERS = {
    "router": {"weight": f"d e {ALL}"},
    "routed": {"gate_up": "e/ep d two f/tp dp=I cp=I", "down": "e/ep f/tp d dp=I cp=I"},
}
SEQUENCE_NAMES = [f"parameters.{part}.{name}" for part, tensors in SEQUENCE_PARAMETERS.items() for name in tensors]


@scheme(
    reference=total_sequence_loss,
    mesh={"dp": (1, 2), "cp": (1, 2, 3), "ep": (1, 2), "tp": (1, 2)},
    inputs={"x": "m b/dp/ep s/cp:dual_chunk_swap/tp d", "parameters": SEQUENCE_PARAMETERS},
    outputs="dp=P cp=P ep=P tp=P",
    dims={"m": (2,), "two": (2,), "e": (4, 8), "d": (4, 3), "f": (4,)},
    draw=dict.fromkeys(("x", *SEQUENCE_NAMES), values("normal")),
    options={"k": (2, 1, 3)},
    rank_options={"exchange": ("all_to_all", "all_gather")},
    nograd=("x",),
    module="parameters",
    dtypes=("float32", "float64"),
    roundings=6,
    reduction=("b", "s", "d", "e", "f"),
    excluded_conditions=("inference_mode", "autocast"),  # the router's product follows autocast
)
def step_over_cp_and_ep(mesh, x, parameters, k, exchange):
    """Ranks of cp have other tokens of the same sequences, ranks of dp and ep other sequences."""
    return trained_on_sequences(mesh, x, parameters, k, exchange)


def sums_over_ranks(weight, bias):
    return weight.sum(0), bias.sum(0)


def cost_of_sums(c):
    once = (1, (c.a + 1) * c.b * c.accumulator_itemsize)
    return Cost(forward={"all_reduce/edp": once, "all_reduce/ep": once})


@scheme(
    reference=sums_over_ranks,
    mesh={"edp": (1, 2), "ep": (1, 2, 3)},
    inputs={"weight": "n/edp/ep a b", "bias": "n/edp/ep b"},
    outputs=("a b edp=I ep=I", "b edp=I ep=I"),
    dims={"n": "edp*ep"},
    draw=dict.fromkeys(("weight", "bias"), values("normal", "zeros", "ties")),
    nograd=("weight", "bias"),
    rank_options={"stored": ("plain", "transposed"), "is_listed_twice": (False, True)},
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    reduction=("n",),
    cost=cost_of_sums,
)
def summed_gradients(mesh, weight, bias, stored, is_listed_twice):
    """Each rank has its own gradient, or none where all of it is 0; a tied parameter is listed twice."""
    laid_out = {
        "plain": lambda x: x.clone(),
        "transposed": lambda x: x.mT.clone(memory_format=torch.contiguous_format).mT,
    }[stored]
    parameters = [torch.nn.Parameter(torch.zeros_like(x[0])) for x in (weight, bias)]
    for parameter, gradient in zip(parameters, (laid_out(weight[0]), bias[0].clone()), strict=True):
        parameter.grad = gradient if gradient.any() else None
    listed = parameters * 2 if is_listed_twice else parameters
    sum_gradients(listed, [mesh["edp"], mesh["ep"]])
    return tuple(parameter.grad for parameter in parameters)


SCHEMES = (step_of_expert_layer, step_over_cp_and_ep, summed_gradients)
test_parity = parity(SCHEMES, lockstep=30)


test_parity_on_processes = pytest.mark.fast_values(1)(parity(SCHEMES, gloo=4))


def sum_over_ranks(groups_of, parameters_of, **mesh):
    """Each rank's .grad after the sum, and its ledger."""

    def body(view, case):
        parameters = parameters_of(view)
        sum_gradients(parameters, groups_of(view))
        return [parameter.grad for parameter in parameters]

    return run(body, CaseSpec(scheme="gradients", mesh=mesh))


def with_gradient(values, dtype=torch.float32):
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def test_a_sum_over_two_groups_equals_a_sum_over_their_product():
    one_parameter = lambda view: [with_gradient([2.0 ** (2 * view.rank("dp") + view.rank("ep"))])]  # noqa: E731
    one_by_one = sum_over_ranks(lambda view: [view["dp"], view["ep"]], one_parameter, dp=2, ep=2)
    at_once = sum_over_ranks(lambda view: [over_all(view, ("dp", "ep"))], one_parameter, dp=2, ep=2)
    assert [rank[0].tolist() for rank in one_by_one.results] == [[15.0]] * 4
    assert [rank[0].tolist() for rank in at_once.results] == [[15.0]] * 4
    assert [len(outcome.ledger.of(0)) for outcome in (one_by_one, at_once)] == [2, 1]


def test_one_message_for_each_dtype_in_float32_or_wider():
    def parameters(view):
        return [with_gradient([1.0, 2.0], torch.bfloat16), with_gradient([3.0]), with_gradient([4.0], torch.bfloat16)]

    outcome = sum_over_ranks(lambda view: [view["dp"]], parameters, dp=2)
    assert [(row.op, row.dtypes, row.bytes_in) for row in outcome.ledger.of(0)] == [
        ("all_reduce", ("float32",), 12),
        ("all_reduce", ("float32",), 4),
    ]
    assert [gradient.tolist() for gradient in outcome.results[0]] == [[2.0, 4.0], [6.0], [8.0]]
    assert [gradient.dtype for gradient in outcome.results[0]] == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_missing_gradient_counts_as_zeros_and_a_repeated_parameter_counts_once():
    def parameters(view):
        shared = with_gradient([1.0])
        if view.rank("dp") == 1:
            shared.grad = None
        return [shared, shared]

    assert [[x.tolist() for x in rank] for rank in sum_over_ranks(lambda v: [v["dp"]], parameters, dp=2).results] == [
        [[1.0]] * 2
    ] * 2


def test_addends_are_rounded_once():
    """256 + 1 + 1 in bfloat16: a sum that is rounded after each addend stays 256."""
    outcome = sum_over_ranks(
        lambda v: [v["dp"]], lambda v: [with_gradient([1.0 if v.rank("dp") else 256.0], torch.bfloat16)], dp=3
    )
    assert [rank[0].tolist() for rank in outcome.results] == [[258.0]] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(1), []), "parameters is a Tensor; pass a list of parameters"),
        (([1], []), r"parameters\[0\] is an int; pass list\(module.parameters\(\)\)"),
        (([], None), "groups is None; pass a list of process groups"),
        (([], [None]), r"groups\[0\] is None; pass a ProcessGroup"),
    ],
)
def test_rejected(arguments, message):
    with pytest.raises(TypeError, match=f"expert_parallel.sum_gradients: {message}"):
        sum_gradients(*arguments)


def test_each_parameter_is_summed_over_its_ranks():
    def body(view, case):
        place = 4 * view.rank("edp") + 2 * view.rank("ep") + view.rank("tp")
        parts = {name: [with_gradient([10.0**place])] for name in ("routed", "shared", "router")}
        groups = {f"{axis}_group": view[axis] for axis in ("edp", "ep", "tp")}
        sum_layer_gradients(**parts, **groups)
        return [int(part.grad.item()) for (part,) in parts.values()]

    first = run(body, CaseSpec(scheme="gradients", mesh={"edp": 2, "ep": 2, "tp": 2})).results[0]
    assert first == [10001, 1010101, 11111111]
