"""Parity of ReplicaGradients: sums and means over the ranks with copies, once after all micro-batches."""

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from parity_tests.rejections import rejected
from parity_tests.slow import slow_but
from shardproof import CaseSpec, Cost, check_cases, mask, scheme, values
from shardproof.engines.engines import run
from torch_impl.optimizers import ReplicaGradients, clip_grad_norm_

NAMES = ("router", "shared", "router_norm")  # router_norm begins with router, and has another rule
RULES = {"": "mean", "router": "sum", "shared": "sum", "frozen": "none"}
ORDERS = {"general first": RULES, "general last": dict(reversed(RULES.items()))}


class Model(nn.Module):
    """Three modules with a weight, a module that shares it, and a frozen module."""

    def __init__(self, router, shared, norm):
        super().__init__()
        for name, weight in zip((*NAMES, "frozen"), (router, shared, norm, norm), strict=True):
            module = nn.Module()
            module.weight = nn.Parameter(torch.zeros_like(weight), requires_grad=name != "frozen")
            setattr(self, name, module)
        self.shared.again = nn.Module()
        self.shared.again.weight = self.shared.weight

    @property
    def gradients(self):
        return tuple(getattr(self, name).weight.grad for name in NAMES)


def make_optimizer(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)


def cost(c):
    """The presence of three gradients, the sums and the mean, over each axis."""
    numbers = c.accumulator_itemsize * (c.a + c.b * c.a + c.b)
    return Cost(forward={f"all_reduce/{axis}": (3, 3 * 4 + numbers) for axis in ("tp", "cp") if c.mesh[axis] > 1})


@scheme(
    reference=lambda router, shared, norm: (router, shared, norm),
    mesh={"tp": (1, 2, 3, 4), "cp": (1, 2)},
    inputs={"router": "a tp=P cp=P", "shared": "b a tp=P cp=P", "norm": "b tp=I cp=I"},
    outputs=("a tp=I cp=I", "b a tp=I cp=I", "b tp=I cp=I"),
    draw=dict.fromkeys(("router", "shared", "norm"), values("normal", "zeros", "large")),
    rank_options={"order": tuple(ORDERS)},
    nograd=("router", "shared", "norm"),
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    cost=cost,
)
@pytest.mark.cases(20)
def replica_gradients(mesh, router, shared, norm, order):
    """Two gradients are addends of a sum over all ranks; the third is the same on every rank."""
    model = Model(router, shared, norm)
    groups = [mesh[axis] for axis in ("tp", "cp") if mesh.size(axis) > 1] or [mesh["tp"]]
    replicas = ReplicaGradients(model, groups, ORDERS[order], make_optimizer(model))
    for name, gradient in zip(NAMES, (router, shared, norm), strict=True):
        getattr(model, name).weight.grad = gradient.clone()
    replicas.reduce()
    return model.gradients


def sum_existing(router, shared, has_router, has_shared):
    """The sums of the gradients that exist, from stacked gradients of all ranks."""
    of_router, of_shared = has_router[..., None], has_shared[..., None, None]
    return jnp.where(of_router, router, 0.0).sum((0, 1)), jnp.where(of_shared, shared, 0.0).sum((0, 1))


@scheme(
    reference=sum_existing,
    mesh={"tp": (1, 2, 3, 4), "cp": (1, 2)},
    inputs={
        "router": "r/tp w/cp a",
        "shared": "r/tp w/cp b a",
        "has_router": "r/tp w/cp",
        "has_shared": "r/tp w/cp",
    },
    outputs=("a tp=I cp=I", "b a tp=I cp=I"),
    dims={"r": "tp", "w": "cp"},
    draw={
        **dict.fromkeys(("router", "shared"), values("normal", "zeros")),
        **dict.fromkeys(("has_router", "has_shared"), mask()),
    },
    nograd=("router", "shared"),
    dtypes=("float32", "bfloat16", "float64"),
    sums="float32",
    reduction=("r", "w"),
)
@pytest.mark.cases(20)
def replica_gradients_of_some_ranks(mesh, router, shared, has_router, has_shared):
    """A rank whose tokens chose other modules has no gradient and adds zeros; one that no rank has stays None."""
    model = Model(router[0, 0], shared[0, 0], router[0, 0])
    replicas = ReplicaGradients(model, [mesh["tp"], mesh["cp"]], RULES, make_optimizer(model))
    for module, gradient, has in ((model.router, router, has_router), (model.shared, shared, has_shared)):
        if has[0, 0]:
            module.weight.grad = gradient[0, 0].clone()
    replicas.reduce()
    assert model.router_norm.weight.grad is None
    return tuple(
        torch.zeros_like(module.weight) if module.weight.grad is None else module.weight.grad
        for module in (model.router, model.shared)
    )


def mean_of_squares(x, z, parameters):
    """The mean square of the scaled tokens of all micro-batches, plus that of a vector that every rank has."""
    router, norm = parameters["router"]["weight"], parameters["norm"]["weight"]
    return jnp.mean((x * router[None, None]) ** 2) + jnp.mean((z * norm[None]) ** 2)


@scheme(
    reference=mean_of_squares,
    mesh={"tp": (1, 2, 4)},
    inputs={
        "x": "m s/tp d",
        "z": "m d tp=I",
        "parameters": {"router": {"weight": "d tp=I"}, "norm": {"weight": "d tp=I"}},
    },
    outputs="tp=I",
    dims={"m": (1, 2, 3), "d": (3, 1)},
    draw={name: values("normal") for name in ("x", "z", "parameters.router.weight", "parameters.norm.weight")},
    nograd=("x", "z"),
    module="parameters",
    dtypes=("float32", "float64"),
    reduction=("m", "s", "d"),
)
@pytest.mark.cases(20)
def replica_gradients_of_micro_batches(mesh, x, z, parameters):
    """One module scales this rank's tokens, the other a vector that every rank has."""
    model = nn.Module()
    for name, leaves in parameters.items():
        setattr(model, name, nn.Module())
        getattr(model, name).weight = nn.Parameter(leaves["weight"].clone())
    replicas = ReplicaGradients(model, [mesh["tp"]], {"router": "sum", "norm": "mean"}, make_optimizer(model))
    total = x.new_zeros(())
    for tokens, vector in zip(x, z, strict=True):
        local = (tokens * model.router.weight).square().sum() / (len(x) * mesh.total("s") * x.shape[-1])
        same = (vector * model.norm.weight).square().mean() / len(x)
        (local + same).backward()
        total = total + local.detach() + same.detach() / mesh.size("tp")
    replicas.reduce()
    torch.distributed.all_reduce(total, group=mesh["tp"])
    return total, model


SCHEMES = (replica_gradients, replica_gradients_of_some_ranks, replica_gradients_of_micro_batches)


@pytest.mark.parametrize("engine", slow_but(["lockstep"], ["lockstep", "gloo"]))
@pytest.mark.parametrize("declared", SCHEMES, ids=lambda declared: declared.name)
def test_parity(declared, engine):
    check_cases(declared, 20 if engine == "lockstep" else 3, engine=engine)


def on_ranks(n, body):
    return run(body, CaseSpec(scheme="replicas", mesh={"tp": n})).results


def ones_model(mesh):
    model = Model(torch.ones(2), torch.ones(3, 2), torch.ones(3))
    optimizer = make_optimizer(model)
    return model, optimizer, ReplicaGradients(model, [mesh["tp"]], RULES, optimizer)


def test_a_mean_brings_copies_together():
    def body(mesh, case):
        model, _, replicas = ones_model(mesh)
        model.router_norm.weight.grad = torch.full((3,), 1.0 + mesh.rank("tp"))
        replicas.reduce()
        return model.router_norm.weight.grad.tolist(), model.router.weight.grad

    assert on_ranks(3, body) == (([2.0] * 3, None),) * 3


def test_a_rank_without_a_gradient_adds_zeros_to_a_sum():
    def body(mesh, case):
        model, _, replicas = ones_model(mesh)
        if mesh.rank("tp") == 1:
            model.router.weight.grad = torch.tensor([2.0, 3.0])
        replicas.reduce()
        return model.router.weight.grad.tolist(), model.router_norm.weight.grad

    assert on_ranks(2, body) == (([2.0, 3.0], None),) * 2


def test_gradients_are_reduced_once_in_a_step():
    """A second reduction in a step is rejected; after the step or `skip_step` the next reduction is accepted."""

    def body(mesh, case):
        model, optimizer, replicas = ones_model(mesh)
        for step in range(2):
            model.router.weight.grad = torch.ones(2)
            replicas.reduce()
            with pytest.raises(ValueError, match="gradients are reduced already, and were not used by a step"):
                replicas.reduce()
            clip_grad_norm_(model.parameters(), 1e9)
            if step == 0:
                optimizer.step()
            else:
                replicas.skip_step()
        replicas.reduce()
        return model.router.weight.tolist()

    assert on_ranks(2, body) == ([-2.0, -2.0],) * 2


def test_a_parameter_that_another_axis_shards_is_reduced_by_its_shard():
    def body(mesh, case):
        model = nn.Linear(2, 4, bias=False)
        full = torch.arange(8.0).view(4, 2)
        model.weight = nn.Parameter(distribute_tensor(full, mesh.device_mesh["dp"], [Shard(0)]))
        replicas = ReplicaGradients(model, [mesh["tp"]], {"": "sum"}, make_optimizer(model))
        model.weight.grad = distribute_tensor(full, mesh.device_mesh["dp"], [Shard(0)])
        replicas.reduce()
        return model.weight.grad.full_tensor().tolist()

    results = run(body, CaseSpec(scheme="replicas", mesh={"dp": 2, "tp": 2})).results
    assert results == ((2 * torch.arange(8.0).view(4, 2)).tolist(),) * 4


def build(rules, change=None):
    """A call that builds the model, changes it and passes it to ReplicaGradients."""

    def call(mesh):
        model, optimizer = Model(torch.ones(2), torch.ones(3, 2), torch.ones(3)), torch.optim.SGD([torch.ones(1)])
        return ReplicaGradients(model if change is None else change(mesh, model), [mesh["tp"]], rules, optimizer)

    return call


def shard_router(mesh, model):
    model.router.weight = nn.Parameter(DTensor.from_local(torch.ones(1), mesh.device_mesh["tp"], [Shard(0)]))
    return model


def reduce_with(gradient_of):
    def call(mesh):
        model, _, replicas = ones_model(mesh)
        model.shared.weight.grad = gradient_of(mesh)
        replicas.reduce()

    return call


NEW, REDUCE = "optimizers.ReplicaGradients: ", "ReplicaGradients.reduce: "
REJECTED = [
    (
        "no groups",
        lambda m: ReplicaGradients(nn.Linear(1, 1), [], {}, torch.optim.SGD([torch.ones(1)])),
        NEW + "groups is empty; pass the groups of ranks with copies",
    ),
    (
        "a group twice",
        lambda m: ReplicaGradients(nn.Linear(1, 1), [m["tp"]] * 2, {"": "sum"}, torch.optim.SGD([torch.ones(1)])),
        NEW + "groups[0] and [1] both have the ranks 0, 1, which would count twice; pass one of them",
    ),
    (
        "no rule",
        build({"router": "sum"}),
        NEW + "rules has no rule for shared.weight; add one for its module, or for the model under ''",
    ),
    (
        "no module",
        build({"": "mean", "experts": "sum"}),
        NEW + "rules has 'experts', which is no module of Model",
    ),
    ("unknown rule", build({"": "average"}), NEW + "rules['']='average' is not one of sum, mean, none"),
    (
        "two rules",
        build({"": "mean", "shared": "sum", "shared.again": "none"}),
        NEW + "shared.weight and shared.again.weight are one parameter, with the rules sum and none; use one rule",
    ),
    (
        "sharded over its copies",
        build(RULES, shard_router),
        NEW + "router.weight is sharded over a group of its copies (S(0)); give it the rule 'none'",
    ),
    (
        "sparse",
        reduce_with(lambda m: torch.eye(3, 2).to_sparse()),
        REDUCE + "the gradient of shared.weight is sparse; build its module with sparse=False",
    ),
    (
        "partial",
        reduce_with(lambda m: DTensor.from_local(torch.ones(3, 2), m.device_mesh["tp"], [Partial()])),
        REDUCE + "the gradient of shared.weight is a partial sum; redistribute it first",
    ),
]
test_rejection = rejected({"tp": 2}, REJECTED)


def test_a_gradient_that_some_ranks_lack_is_rejected_under_a_mean():
    def body(mesh, case):
        model, _, replicas = ones_model(mesh)
        model.router_norm.weight.grad = torch.ones(3) if mesh.rank("tp") else None
        with pytest.raises(
            ValueError, match=r"1 of 2 ranks have a gradient of router_norm.weight; its rule must be sum or none"
        ):
            replicas.reduce()

    on_ranks(2, body)
