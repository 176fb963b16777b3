"""Parity of ZeRO-1: gradients reduced to shares, shares stepped, weights gathered; to the bit where sums are exact."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from jax_ref.optimizers import adamw, sgd
from parity_tests.optimizers.parameters import full, shard_of
from parity_tests.parity import parity
from shardproof import CaseSpec, Cost, scheme, values
from shardproof.engines.engines import run
from torch_impl.optimizers import Zero1, clip_grad_norm_

SPECS = {"up": "a b", "down": "b a", "norm": "b"}
DIMS = {"a": (1, 3, 4), "b": (1, 2, 5)}
UNDECAYED = ("norm",)
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def decay_rate(name, weight_decay):
    return 0.0 if name in UNDECAYED else weight_decay


def reference_adamw(weights, gradients, exp_avg, exp_avg_sq, t, weight_decay):
    def after(name):
        state = exp_avg[name], exp_avg_sq[name], t
        return adamw(weights[name], gradients[name], *state, lr=0.1, weight_decay=decay_rate(name, weight_decay))

    return by_name(weights, ("weights", *STATES["adamw"]), after)


def reference_sgd(weights, gradients, momentum_buffer, weight_decay):
    def after(name):
        decay = decay_rate(name, weight_decay)
        return sgd(weights[name], gradients[name], momentum_buffer[name], lr=0.1, momentum=0.9, weight_decay=decay)

    return by_name(weights, ("weights", *STATES["sgd"]), after)


def by_name(names, trees, after):
    """A scheme's outputs by name: each parameter's weight after the step, then its state."""
    return {f"{tree}_{name}": x for name in names for tree, x in zip(trees, after(name), strict=True)}


def declared(states, **changes):
    """The declaration that the schemes share. The ranks' gradients are addends; all else is the same on each rank."""
    replicated = {name: f"{spec} dp=I" for name, spec in SPECS.items()}
    kinds = {"exp_avg_sq": ("positive",), "gradients": ("normal", "zeros")}
    trees = {"weights": replicated, "gradients": {name: f"{spec} dp=P" for name, spec in SPECS.items()}}
    trees |= dict.fromkeys(states, replicated)
    leaves = {f"{tree}.{name}": tree for tree, specs in trees.items() for name in specs}
    return dict(
        mesh={"dp": (1, 2, 3, 4, 5, 7)},
        inputs=trees,
        outputs={f"{tree}_{name}": spec for name, spec in replicated.items() for tree in ("weights", *states)},
        dims=DIMS,
        draw={leaf: values(*kinds.get(tree, ("normal",))) for leaf, tree in leaves.items()},
        nograd=tuple(leaves),
        rank_options={"master": (None, "float64")},
        reduction=(),
        **changes,
    )


def cost(states):
    def share_cost(case):
        """Two shares: parameters with decay, and the others. The scheme also gathers the states of both."""
        shares = [2 * case.a * case.b, case.b]
        longest = [-(-n // case.dp) for n in shares]
        gathered = [n * case.itemsize for n in longest]
        itemsize, summand_itemsize = (8, 8) if case.master else (case.itemsize, case.accumulator_itemsize)
        if case.dp > 1:
            gathered += [n * itemsize for n in longest for _ in range(states)]
        summed = sum(case.dp * n * summand_itemsize for n in longest)
        return Cost(forward={"reduce_scatter": (2, summed), "all_gather": (len(gathered), sum(gathered))})

    return share_cost


def zero1_step(mesh, optimizer, weights, gradients, states, step, weight_decay, master):
    """One step, from these states of the parameters; returns new weights and states, in full.

    `master` is the dtype of the shares. A rank has no .grad for a parameter whose gradient there is all zeros; if this
    parameter is `up`, the rank freezes it after the optimizer is made.
    """
    parameters = {name: nn.Parameter(x.clone()) for name, x in weights.items()}
    for name, each in parameters.items():
        each.grad = gradients[name].clone() if gradients[name].any() else None
    names = [[name for name in parameters if name not in UNDECAYED], list(UNDECAYED)]
    groups = [
        {"params": [parameters[name] for name in group], "weight_decay": decay}
        for group, decay in zip(names, (weight_decay, 0.0), strict=True)
    ]
    dtype = {} if master is None else {"dtype": getattr(torch, master)}
    zero = Zero1(groups, optimizer, mesh.device_mesh, **dtype)
    parameters["up"].requires_grad_(parameters["up"].grad is not None)
    state_of = {}
    for share, group in zip(zero.shares, names, strict=True):
        flat = {key: torch.cat([tree[name].reshape(-1) for name in group]) for key, tree in states.items()}
        wide = {key: x.to(share.dtype) for key, x in flat.items()}
        state_of[share] = {key: shard_of(x, share.data).clone() for key, x in wide.items()} | step()
    zero.reduce_gradients()
    zero.optimizer.state.update(state_of)
    zero.step()
    results = {f"weights_{name}": each.detach() for name, each in parameters.items()}
    for share, group in zip(zero.shares, names, strict=True):
        for key in states:
            parts = full(state_of[share][key]).split([weights[name].numel() for name in group])
            results |= {
                f"{key}_{name}": x.view_as(weights[name]).to(weights[name].dtype)
                for name, x in zip(group, parts, strict=True)
            }
    return results


@scheme(
    reference=reference_adamw,
    options={"t": (1, 2, 1000), "weight_decay": (0.1, 0.0)},
    **declared(STATES["adamw"], cost=cost(2)),
)
@pytest.mark.cases(3, engine="gloo")
def zero1_adamw(mesh, weights, gradients, exp_avg, exp_avg_sq, t, weight_decay, master):
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    step = lambda: {"step": torch.tensor(t - 1.0)}  # noqa: E731  one for each share, which counts it up
    return zero1_step(mesh, make_adamw, weights, gradients, states, step, weight_decay, master)


@scheme(
    reference=reference_sgd,
    options={"weight_decay": (0.1, 0.0)},
    **declared(STATES["sgd"], dtypes=("float32", "bfloat16", "float64"), roundings=4, cost=cost(1)),
)
def zero1_sgd(mesh, weights, gradients, momentum_buffer, weight_decay, master):
    states = {"momentum_buffer": momentum_buffer}
    return zero1_step(mesh, make_sgd, weights, gradients, states, dict, weight_decay, master)


def make_adamw(groups):
    return torch.optim.AdamW(groups, lr=0.1)


def make_sgd(groups):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


RATE, STEPS = 0.1, 3


def reference_two_dtypes(weights, gradients):
    """Steps of plain descent; the norm's weight is frozen."""
    moved = {name: weights[name] - STEPS * RATE * gradients[name] for name in weights if name not in UNDECAYED}
    return {f"weights_{name}": x for name, x in {**weights, **moved}.items()}


def two_dtype_cost(c):
    """A share for each dtype; the last step, without gradients, gathers once more."""
    sizes = {8: 2 * c.a * c.b} if c.itemsize == 8 else {c.itemsize: c.a * c.b, 8: c.a * c.b}
    longest = {itemsize: -(-size // c.dp) for itemsize, size in sizes.items()}
    summed = sum(c.dp * n * max(itemsize, 4) for itemsize, n in longest.items())
    gathered = sum(n * itemsize for itemsize, n in longest.items())
    calls, gathers = STEPS * len(sizes), (STEPS + 1) * len(sizes)
    return Cost(forward={"reduce_scatter": (calls, STEPS * summed), "all_gather": (gathers, (STEPS + 1) * gathered)})


def two_dtypes():
    common = declared((), dtypes=("float32", "float64"), roundings=4, cost=two_dtype_cost)
    return {**common, "mesh": {"dp": (1, 2, 3)}, "rank_options": {"stored": ("plain", "transposed")}}


@scheme(reference=reference_two_dtypes, **two_dtypes())
def zero1_of_two_dtypes(mesh, weights, gradients, stored):
    """One group with a parameter of the tested dtype, one of float64 and a frozen one; some are stored transposed."""

    def laid_out(x):
        return x.t().contiguous().t() if stored == "transposed" and x.ndim == 2 else x

    dtypes = {"up": weights["up"].dtype, "down": torch.float64, "norm": weights["norm"].dtype}
    parameters = {
        name: nn.Parameter(laid_out(x.to(dtypes[name]).clone()), requires_grad=name not in UNDECAYED)
        for name, x in weights.items()
    }
    zero = Zero1(list(parameters.values()), lambda groups: torch.optim.SGD(groups, lr=RATE), mesh.device_mesh)
    for _ in range(STEPS):
        for name, each in parameters.items():
            each.grad = None if name in UNDECAYED else laid_out(gradients[name].to(dtypes[name]).clone())
        zero.reduce_gradients()
        zero.step()
    zero.step()  # no gradients are left, so it moves nothing
    return {f"weights_{name}": each.detach().to(weights[name].dtype) for name, each in parameters.items()}


SMALL, MANY = 2.0**-8, 32  # one step is rounded away in most 16-bit weights, MANY steps are not


def reference_small_steps(weights, gradients):
    return {f"weights_{name}": x - MANY * SMALL * gradients[name] for name, x in weights.items()}


def small_steps():
    common = declared((), dtypes=("bfloat16",), sums="float32")
    return {**common, "mesh": {"dp": (1, 2, 3)}, "rank_options": {"master": ("float32", "float64")}}


@scheme(reference=reference_small_steps, **small_steps())
def zero1_of_small_steps(mesh, weights, gradients, master):
    """Master weights keep the digits of all steps; the parameters have them rounded."""
    parameters = {name: nn.Parameter(x.clone()) for name, x in weights.items()}
    zero = Zero1(
        list(parameters.values()),
        lambda groups: torch.optim.SGD(groups, lr=SMALL),
        mesh.device_mesh,
        dtype=getattr(torch, master),
    )
    for _ in range(MANY):
        for name, each in parameters.items():
            each.grad = gradients[name].clone()
        zero.reduce_gradients()
        zero.step()
    return {f"weights_{name}": each.detach() for name, each in parameters.items()}


test_parity = parity([zero1_adamw, zero1_sgd, zero1_of_two_dtypes, zero1_of_small_steps], lockstep=12)


# To the bit: sums of integers are exact, and the step is the same arithmetic on fewer elements

SHAPES = [(7, 3), (5,), (2, 1)]
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def model():
    return [nn.Parameter(torch.linspace(-1.0, 2.0, torch.Size(s).numel()).view(s).sin()) for s in SHAPES]


def gradient(parameter, rank, step):
    """Integers that differ between ranks and steps."""
    count = torch.arange(float(parameter.numel())).view_as(parameter)
    return (count * (rank + 2) + step) % 5 - 2


def zero1_run(mesh, case):
    parameters, rank = model(), mesh.rank("dp")
    zero = Zero1(parameters, OPTIMIZERS[case.options["optimizer"]], mesh.device_mesh)
    for step in range(STEPS):
        for i, each in enumerate(parameters):
            each.grad = None if (i, rank) == (2, 0) else gradient(each, rank, step)
        zero.reduce_gradients()
        norm = clip_grad_norm_(zero.shares, case.options["max_norm"], 1.0)  # of integers: exact
        zero.step()
    return [each.detach() for each in parameters], norm, [share.grad for share in zero.shares]


@pytest.mark.parametrize("max_norm", [1e9, 2.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dp", [1, 3, 4])
def test_equal_to_the_bit(dp, name, max_norm):
    parameters = model()
    optimizer = OPTIMIZERS[name](parameters)
    for step in range(STEPS):
        for i, each in enumerate(parameters):
            ranks = [rank for rank in range(dp) if (i, rank) != (2, 0)]
            each.grad = sum((gradient(each, rank, step) for rank in ranks), torch.zeros_like(each))
        norm = clip_grad_norm_(parameters, max_norm, 1.0)
        optimizer.step()
    results = run(
        zero1_run, CaseSpec(scheme="zero1", mesh={"dp": dp}, options={"optimizer": name, "max_norm": max_norm})
    )
    for after, total, gradients in results.results:
        assert all(torch.equal(x, y.detach()) for x, y in zip(after, parameters, strict=True))
        assert torch.equal(total, norm) and gradients == [None]


# Master weights, schedules, weights that were changed


def narrow_run(mesh, case):
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    zero = Zero1(
        [parameter], lambda shares: torch.optim.SGD(shares, lr=2.0**-12), mesh.device_mesh, dtype=torch.float32
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(zero.optimizer, lambda step: float(step < 32))
    for _ in range(40):
        parameter.grad = torch.ones_like(parameter)
        zero.reduce_gradients()
        assert zero.shares[0].grad.dtype == torch.float32
        zero.step()
        schedule.step()
    return parameter.detach(), full(zero.shares[0].detach())


def test_master_weights_add_up_terms_that_bfloat16_would_lose():
    """32 steps of 2^-11, from the gradients of two ranks. One step is below half a unit of bfloat16 at 1."""
    for narrow, wide in run(narrow_run, CaseSpec(scheme="zero1", mesh={"dp": 2})).results:
        assert wide.dtype == torch.float32 and set(wide.tolist()) == {1 - 2.0**-6}
        assert narrow.dtype == torch.bfloat16 and set(narrow.tolist()) == {1 - 2.0**-6}


def changed_run(mesh, case):
    parameter = nn.Parameter(torch.arange(5.0))
    zero = Zero1([parameter], make_sgd, mesh.device_mesh)
    shares = full(zero.shares[0].detach())
    parameter.data.zero_()
    zero.gather_weights()
    return shares, parameter.detach()


def test_weights_are_gathered_from_the_shares():
    for shares, gathered in run(changed_run, CaseSpec(scheme="zero1", mesh={"dp": 2})).results:
        assert shares.tolist() == gathered.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def frozen_run(mesh, case):
    frozen, other = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(2))
    zero = Zero1([frozen, other], OPTIMIZERS["adamw"], mesh.device_mesh)
    zero.reduce_gradients()
    zero.step()
    return frozen.tolist(), other.tolist()


def test_a_frozen_parameter_is_left_alone_and_one_without_gradient_is_decayed():
    for frozen, other in run(frozen_run, CaseSpec(scheme="zero1", mesh={"dp": 2})).results:
        assert frozen == [1.0] * 3 and len(set(other)) == 1 and other[0] < 1.0


# Rejections

TWICE = nn.Parameter(torch.zeros(2))


def rejected(arguments, mesh):
    def body(view, case):
        sharded = nn.Parameter(
            distribute_tensor(torch.zeros(4), view.device_mesh, [Shard(0)] + [Replicate()] * (len(mesh) - 1))
        )
        passed = {
            "params": [nn.Parameter(torch.zeros(2))],
            "optimizer": make_sgd,
            "mesh": view.device_mesh,
            **arguments,
        }
        if passed["params"] == "sharded":
            passed["params"] = [sharded]
        with pytest.raises((TypeError, ValueError)) as error:
            Zero1(**passed)
        return str(error.value)

    return run(body, CaseSpec(scheme="zero1", mesh=mesh)).results[0]


REJECTED = [
    ({"mesh": None}, "optimizers.Zero1: mesh is None; pass a torch DeviceMesh"),
    ({"optimizer": 3}, "optimizers.Zero1: optimizer=3 is an int; pass a function"),
    ({"params": []}, "optimizers.Zero1: params has no parameter to step; pass the parameters of a model"),
    ({"params": [3]}, "optimizers.Zero1: group 0 of params has an int; pass tensors"),
    (
        {"params": [torch.zeros(2, dtype=torch.int64)]},
        "params has a parameter of torch.int64; pass floating ones",
    ),
    ({"params": [TWICE, TWICE]}, "optimizers.Zero1: a parameter is passed twice; pass each once, as"),
    (
        {"params": "sharded"},
        "group 0 of params has a DTensor; its state is sharded as it is, so step it",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REJECTED)
def test_rejected(arguments, message):
    assert re.search(re.escape(message), rejected(arguments, {"dp": 1}))


def test_a_mesh_of_two_axes_is_rejected():
    assert rejected({}, {"dp": 1, "tp": 1}) == (
        "optimizers.Zero1: mesh has 2 axes; pass one of them, such as mesh['dp']"
    )
