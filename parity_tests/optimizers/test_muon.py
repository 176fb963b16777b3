"""Parity of a step of Muon over shards of rows, columns and experts, by both routes; optax beside our reference."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import pytest
import torch
from optax.contrib import MuonDimensionNumbers, scale_by_muon
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from jax_ref.optimizers import muon
from parity_tests.optimizers.parameters import (
    distributed,
    full,
    fully_sharded,
    local,
    placed,
    shard_of,
    stepped,
    weight,
)
from parity_tests.parity import parity
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from torch_impl.optimizers import Muon

# None leaves the argument out: the default then has to equal the reference's own
OPTIONS = {"lr": (0.02, 0.5, None), "weight_decay": (0.1, 0.0, None), "momentum": (0.95, 0.5, None),
           "nesterov": (True, False, None), "steps": (5, 1, None)}  # fmt: skip
DEFAULTS = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "steps": 5}
ROUTES = {"route": ("owners", "sharded", None)}
ROWS = {"qkv": (4, 2, 2)}  # heights of the matrices that a parameter has one above the other


def passed(options):
    """The options that are not left out."""
    return {name: value for name, value in options.items() if value is not None}


def reference(weights, gradients, buffers, lr, weight_decay, momentum, nesterov, steps, calls=1, absent=None):
    options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "steps": steps}
    after = {name: (weights[name], buffers[name]) for name in weights}
    for name in weights.keys() - {absent}:
        for _ in range(calls):
            weight, buffer = after[name]
            after[name] = muon(weight, gradients[name], buffer, rows=ROWS.get(name), **DEFAULTS | passed(options))
    return {f"{tree}_{name}": after[name][i] for name in after for i, tree in enumerate(("weights", "buffers"))}


def by_optax(weights, gradients, buffers, lr, weight_decay, momentum, nesterov):
    numbers = {name: MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) for name, x in weights.items()}
    optimizer = scale_by_muon(beta=momentum, eps=0.0, nesterov=nesterov, weight_dimension_numbers=numbers)
    late = jnp.int32(10**6)  # optax divides by 1 - beta^t, which is 1 then
    # Without jit its loop is unrolled, so that the rounding of every step counts.
    with jax.numpy_dtype_promotion("standard"), jax.disable_jit():
        state = optimizer.init(weights)._replace(count=late, mu=buffers)
        updates, state = optimizer.update(gradients, state)
    scales = {name: 0.2 * math.sqrt(max(x.shape[-2:])) for name, x in weights.items()}
    new = {name: x - lr * (scales[name] * updates[name] + weight_decay * x) for name, x in weights.items()}
    return {f"weights_{name}": x for name, x in new.items()} | {f"buffers_{name}": x for name, x in state.mu.items()}


def declared(specs, dims, mesh, kinds=("zeros",), **changes):
    """The declaration that the schemes share: trees of weights, gradients and momentum buffers; a step returns two."""
    leaves = [f"{tree}.{name}" for tree in ("weights", "gradients", "buffers") for name in specs]
    return dict(
        mesh=mesh,
        inputs=dict.fromkeys(("weights", "gradients", "buffers"), specs),
        outputs={f"{tree}_{name}": spec for name, spec in specs.items() for tree in ("weights", "buffers")},
        dims=dims,
        draw={leaf: values("normal", *kinds) for leaf in leaves},
        nograd=tuple(leaves),
        **{
            "options": OPTIONS,
            "dtypes": ("float32", "float64"),
            "reduction": tuple(dims),
            "reference": reference,
            **changes,
        },
    )


def muon_step(
    parameters, buffers, lr, weight_decay, momentum, nesterov, steps=None, route=None, dtype=None, result=local, calls=1
):
    """Step `parameters`, some of which have gradients. `result` makes the returned tensor of each weight and buffer.

    Settings that are None are left out.
    """
    fused = [{"params": [parameters[name]], "rows": rows} for name, rows in ROWS.items() if name in parameters]
    others = [{"params": [parameters[name] for name in parameters if name not in ROWS]}]
    settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "steps": steps}
    optimizer = Muon([*others, *fused], **passed(settings | {"route": route, "dtype": dtype}))
    states = {name: {"momentum_buffer": buffers[name].clone()} for name in parameters}
    stepped(optimizer, ((parameters[name], state) for name, state in states.items()))
    for _ in range(calls - 1):
        optimizer.step()
    weights = {f"weights_{name}": result(each.detach()) for name, each in parameters.items()}
    return weights | {f"buffers_{name}": result(state["momentum_buffer"]) for name, state in states.items()}


def on_mesh(mesh, placements, weights, gradients, buffers):
    parameters = {name: weight(weights[name], gradients[name], mesh, placements[name]) for name in weights}
    return parameters, {name: placed(x, mesh, placements[name]) for name, x in buffers.items()}


# Over one axis

LAYER = {"tall": (Shard(0),), "wide": (Shard(1),), "qkv": (Shard(0),), "experts": (Shard(0),),
         "sharded_experts": (Shard(2),), "layers": (Shard(3),), "replicated": (Replicate(),)}  # fmt: skip
SPECS = {"tall": "a/dp k", "wide": "k a/dp", "qkv": "h/dp k", "experts": "e/dp k f", "sharded_experts": "g k a/dp",
         "layers": "j g k a/dp", "replicated": "k f dp=I"}  # fmt: skip
DIMS = {"a": (4, 8), "k": (2, 3), "h": (8,), "e": (4,), "f": (2, 5), "g": (1, 2), "j": (2,)}


def with_strides_swapped(x):
    """The same tensor, stored with its second dim outermost, so that its first two are not one batch in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


OF_CALLS = {"calls": (1, 2), "absent": (None, "wide")}


@scheme(**declared(SPECS, DIMS, {"dp": (1, 2, 4)}, rank_options=ROUTES, options=OPTIONS | OF_CALLS))
def muon_over_shards(
    mesh, weights, gradients, buffers, lr, weight_decay, momentum, nesterov, steps, calls, absent, route
):
    """One or two steps; a parameter may have no gradient."""
    trees = [{**tree, "layers": with_strides_swapped(tree["layers"])} for tree in (weights, gradients, buffers)]
    parameters, buffers = on_mesh(mesh.device_mesh, LAYER, *trees)
    if absent is not None:
        parameters[absent].grad = None
    return muon_step(parameters, buffers, lr, weight_decay, momentum, nesterov, steps, route, calls=calls)


def cost(case):
    """Of the e experts, each sharded over columns: by owners, who have e / dp of them each, or sharded.

    By default, the route is the one that sends less in the mean; `dtype` is the dtype of the products.
    """
    if case.dp == 1:
        return Cost()
    steps = 5 if case.steps is None else case.steps
    product_itemsize = 8 if case.dtype_of_products else case.accumulator_itemsize
    triangles = case.m * (case.m + 1) // 2 * max(case.itemsize, 4)
    sends_less = case.n * case.m * case.itemsize > case.dp * (8 + steps * triangles)
    if case.route == "sharded" or (case.route is None and sends_less):
        triangles = case.m * (case.m + 1) // 2 * product_itemsize
        return Cost(forward={"all_reduce": (1 + steps, case.e * (8 + steps * triangles))})
    return Cost(forward={"all_to_all": (2, 2 * case.e * case.m * case.n // case.dp * case.itemsize)})


@scheme(
    **declared(
        {"experts": "e m n/dp"},
        {"e": (4,), "m": (1, 2, 3), "n": (4, 8, 40)},
        {"dp": (1, 2, 4)},
        rank_options=ROUTES | {"dtype_of_products": (None, "float64")},
        dtypes=("float32", "float64", "bfloat16"),
        sums="float32",
        roundings=8,
        cost=cost,
    )
)
def muon_of_sharded_experts(
    mesh, weights, gradients, buffers, lr, weight_decay, momentum, nesterov, steps, route, dtype_of_products
):
    arguments = on_mesh(mesh.device_mesh, {"experts": (Shard(2),)}, weights, gradients, buffers)
    dtype = None if dtype_of_products is None else getattr(torch, dtype_of_products)
    return muon_step(*arguments, lr, weight_decay, momentum, nesterov, steps, route, dtype)


# Over two axes: gathered over one of them


TWO_AXES = {"both": (Shard(0), Shard(1)), "nested": (Shard(0), Shard(0)), "experts": (Shard(0), Shard(1))}


@scheme(
    **declared(
        {"both": "a/dp b/tp", "nested": "a/dp/tp k", "experts": "e/dp b/tp k"},
        {"a": (4,), "b": (2, 4), "k": (3,), "e": (2,)},
        {"dp": (1, 2), "tp": (1, 2)},
        rank_options=ROUTES,
    )
)
def muon_over_fsdp_and_tp(mesh, weights, gradients, buffers, lr, weight_decay, momentum, nesterov, steps, route):
    arguments = on_mesh(mesh.device_mesh, TWO_AXES, weights, gradients, buffers)
    return muon_step(*arguments, lr, weight_decay, momentum, nesterov, steps, route)


# FSDP2's parameters, of sizes that the ranks share unevenly or that leave some without a row

FULL = {"qkv": "h k dp=I", "down": "a k dp=I", "up": "k a dp=I"}


@scheme(**declared(FULL, {"h": (8,), "a": (1, 3, 5), "k": (2, 4)}, {"dp": (1, 2, 3, 5, 7)}, rank_options=ROUTES))
@pytest.mark.cases(3, engine="gloo")
def muon_over_fsdp2(mesh, weights, gradients, buffers, lr, weight_decay, momentum, nesterov, steps, route):
    parameters = fully_sharded(mesh.device_mesh, weights, gradients)
    buffers = {name: shard_of(x, parameters[name]) for name, x in buffers.items()}
    return muon_step(parameters, buffers, lr, weight_decay, momentum, nesterov, steps, route, result=full)


# The same over tensor parallelism: of a dim that tp shards FSDP2 shards every rank's rows

OVER_TP = {"qkv": Shard(0), "down": Shard(1), "up": Shard(0)}
TWICE = {"qkv": "h k dp=I tp=I", "down": "a k dp=I tp=I", "up": "k a dp=I tp=I"}


@scheme(**declared(TWICE, {"h": (8,), "a": (4,), "k": (2, 4)}, {"dp": (1, 2), "tp": (1, 2)}, rank_options=ROUTES))
def muon_over_fsdp2_and_tp(mesh, weights, gradients, buffers, lr, weight_decay, momentum, nesterov, steps, route):
    parameters = fully_sharded(mesh.device_mesh, weights, gradients, OVER_TP)
    buffers = {name: shard_of(x, parameters[name]) for name, x in buffers.items()}
    return muon_step(parameters, buffers, lr, weight_decay, momentum, nesterov, steps, route, result=full)


SCHEMES = (
    muon_over_shards,
    muon_of_sharded_experts,
    muon_over_fsdp_and_tp,
    muon_over_fsdp2,
    muon_over_fsdp2_and_tp,
)
test_parity = parity(SCHEMES, lockstep=12)


# optax in place of our reference


def tall_and_experts(mesh, weights, gradients, buffers, lr, weight_decay, momentum, nesterov):
    placements = {"tall": (Shard(0),), "experts": (Shard(2),)}
    arguments = on_mesh(mesh.device_mesh, placements, weights, gradients, buffers)
    return muon_step(*arguments, lr, weight_decay, momentum, nesterov)


@pytest.mark.slow
def test_optax_is_as_near_as_our_reference():
    specs, dims = {"tall": "a/dp k", "experts": "e k a/dp"}, {"a": (4,), "k": (2, 3), "e": (2,)}
    options = {"lr": (0.02, 0.5), "weight_decay": (0.1, 0.0), "momentum": (0.95, 0.5), "nesterov": (True, False)}
    # No zeros: its norm has no derivative there.
    of_optax = {"kinds": (), "dtypes": ("float32",), "reference": by_optax, "options": options}
    report = scheme(**declared(specs, dims, {"dp": (1, 2)}, **of_optax))(tall_and_experts).verify(examples=6)
    assert report.ok, str(report)


# Several steps, groups and the other effects of a call


def matrix(*shape):
    created = nn.Parameter(torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape).clone())
    created.grad = created.detach().sin()
    return created


def test_state_is_created_by_the_first_step_and_has_torchs_name():
    ours, theirs = matrix(4, 3), matrix(4, 3)
    optimizers = Muon([ours]), torch.optim.Muon([theirs])
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()
    assert torch.equal(optimizers[0].state[ours]["momentum_buffer"], optimizers[1].state[theirs]["momentum_buffer"])


def test_defaults_are_torchs():
    theirs = inspect.signature(torch.optim.Muon).parameters
    ours = inspect.signature(Muon).parameters
    assert {name: ours[name].default for name in ("lr", "weight_decay", "momentum", "nesterov")} == {
        name: theirs[name].default for name in ("lr", "weight_decay", "momentum", "nesterov")
    }


def test_a_schedule_of_torch_sets_the_rate():
    """With a rate of 0 nothing moves; the momentum does."""
    each = matrix(4, 3)
    optimizer = Muon([each], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 0))
    before = each.detach().clone()
    optimizer.step()
    assert torch.equal(each, before) and optimizer.state[each]["momentum_buffer"].any()
    schedule.step()
    optimizer.step()
    assert not torch.equal(each, before)


def test_a_parameter_without_a_gradient_is_left_alone():
    stepped_one, other = matrix(2, 2), matrix(2, 2)
    other.grad, before = None, other.detach().clone()
    optimizer = Muon([stepped_one, other])
    assert optimizer.step(lambda: 3.0) == 3.0
    assert torch.equal(other, before) and other not in optimizer.state


def narrow_step(mesh, case):
    created = distributed(torch.eye(4)[:, :3], mesh.device_mesh, [Shard(0)])
    Muon([created], dtype=torch.bfloat16, route=case.options["route"]).step()
    return local(created.detach()).dtype


@pytest.mark.parametrize(("route", "sent"), [("owners", ["bfloat16"] * 2), ("sharded", ["float64"] + ["float32"] * 5)])
def test_no_more_digits_than_are_computed_with_are_sent(route, sent):
    outcome = run(narrow_step, CaseSpec(scheme="muon", mesh={"dp": 2}, options={"route": route}))
    rows = [row for row in outcome.ledger.of(0) if row.op in ("all_to_all", "all_reduce")]
    assert [row.dtypes[0].removeprefix("torch.") for row in rows] == sent and outcome.results == (torch.float32,) * 2


def step_of_two_dtypes(mesh, case):
    dtypes = torch.bfloat16, torch.float32
    Muon(
        [distributed(torch.eye(4, dtype=each), mesh.device_mesh, [Shard(0)]) for each in dtypes], route="owners"
    ).step()


def test_a_narrow_matrix_beside_a_wide_one_is_sent_narrow():
    outcome = run(step_of_two_dtypes, CaseSpec(scheme="muon", mesh={"dp": 2}))
    sent = [row.dtypes[0].removeprefix("torch.") for row in outcome.ledger.of(0) if row.op == "all_to_all"]
    assert sent == ["bfloat16"] * 2 + ["float32"] * 2


def body_of_a_gradient_elsewhere(mesh, case):
    created = distributed(torch.ones(4, 2), mesh.device_mesh, [Shard(0)])
    created.grad = DTensor.from_local(torch.ones(4, 2), mesh.device_mesh, [Partial()])
    before = created.detach().clone().to_local()
    with pytest.raises(ValueError, match=re.escape("a gradient is (Partial(sum),), its parameter is (Shard(dim=0),);")):
        Muon([created]).step()
    return torch.equal(local(created.detach()), before)


def test_a_gradient_that_is_placed_otherwise_is_rejected_before_anything_is_sent():
    outcome = run(body_of_a_gradient_elsewhere, CaseSpec(scheme="muon", mesh={"dp": 2}))
    assert outcome.results == (True, True)
    assert not [row for row in outcome.ledger.of(0) if row.op in ("all_to_all", "all_reduce")]


REJECTED = [
    ({"lr": -1.0}, "optimizers.Muon: lr=-1.0 must be at least 0"),
    ({"momentum": 1.0}, "optimizers.Muon: momentum=1.0 must be at least 0 and below 1"),
    ({"steps": 0}, "optimizers.Muon: steps=0 must be at least 1"),
    ({"route": "ring"}, "optimizers.Muon: route='ring' is not one of owners, sharded"),
    ({"dtype": "bfloat16"}, "optimizers.Muon: dtype='bfloat16' is a str; pass a torch.dtype"),
    ({"rows": (2, 1)}, "optimizers.Muon: rows=(2, 1) are not the rows of params[0] of group 0, which has 4; pass the"),
    ({"params": [nn.Parameter(torch.zeros(3))]}, "params[0] of group 0 is [3] and no matrix; step vectors with"),
]


@pytest.mark.parametrize(("arguments", "message"), REJECTED)
def test_rejected(arguments, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Muon(**{"params": [matrix(4, 3)], **arguments})
