"""Parity of a step of AdamW and of SGD over sharded parameters, state in and state out; optax beside our reference."""

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from jax_ref.optimizers import adamw, sgd
from parity_tests.optimizers.parameters import full, fully_sharded, local, placed, shard_of, stepped, weight
from parity_tests.parity import parity
from shardproof import Cost, scheme, values

# A layer over FSDP and tensor parallelism: three matrices, and a norm's vector that is not decayed.
LAYER = {"both": (Shard(0), Shard(1)), "rows": (Shard(0), Replicate()), "columns": (Replicate(), Shard(1)),
         "norm": (Replicate(), Replicate())}  # fmt: skip
SPECS = {"both": "a/dp b/tp", "rows": "e/dp f tp=I", "columns": "f b/tp dp=I", "norm": "f dp=I tp=I"}
DIMS = {"a": (6,), "b": (2, 4), "e": (6,), "f": (1, 3)}
UNDECAYED = ("norm",)
ADAMW = {"t": (1, 2, 1000), "lr": (1e-3, 0.5), "weight_decay": (0.0, 0.1), "betas": ((0.9, 0.999), (0.5, 0.95))}
SGD = {"lr": (1e-3, 0.5), "weight_decay": (0.0, 0.1), "momentum": (0.5, 0.9), "nesterov": (False, True)}


def by_name(trees, after):
    """A scheme's outputs by name: each parameter's weight after the step, then its state."""
    return {f"{tree}_{name}": x for name, results in after.items() for tree, x in zip(trees, results, strict=True)}


def decay_of(name, weight_decay):
    return 0.0 if name in UNDECAYED else weight_decay


def reference_adamw(weights, gradients, means, mean_squares, t, lr, weight_decay, betas):
    after = {
        name: adamw(
            weights[name], gradients[name], means[name], mean_squares[name], t,
            lr=lr, weight_decay=decay_of(name, weight_decay), betas=betas,
        )
        for name in weights
    }  # fmt: skip
    return by_name(("weights", "means", "mean_squares"), after)


def reference_sgd(weights, gradients, buffers, lr, weight_decay, momentum, nesterov):
    after = {
        name: sgd(
            weights[name], gradients[name], buffers[name],
            lr=lr, weight_decay=decay_of(name, weight_decay), momentum=momentum, nesterov=nesterov,
        )
        for name in weights
    }  # fmt: skip
    return by_name(("weights", "buffers"), after)


def transposed(*trees):
    """Trees of tensors as one tree of tuples."""
    return {name: tuple(tree[name] for tree in trees) for name in trees[0]}


def decayed(weights):
    return {name: name not in UNDECAYED for name in weights}


def optax_adamw(weights, gradients, means, mean_squares, t, lr, weight_decay, betas):
    b1, b2 = betas
    optimizer = optax.adamw(lr, b1=b1, b2=b2, eps=1e-8, weight_decay=weight_decay, mask=decayed)
    moments, *rest = optimizer.init(weights)
    state = (moments._replace(count=jnp.int32(t - 1), mu=means, nu=mean_squares), *rest)
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
        updates, (moments, *_) = optimizer.update(gradients, state, weights)
    weights = optax.apply_updates(weights, updates)
    return by_name(("weights", "means", "mean_squares"), transposed(weights, moments.mu, moments.nu))


def optax_sgd(weights, gradients, buffers, lr, weight_decay, momentum, nesterov):
    chain = optax.chain(
        optax.masked(optax.add_decayed_weights(weight_decay), decayed),
        optax.trace(decay=momentum, nesterov=nesterov),
        optax.scale(-lr),
    )
    decay, trace, scale = chain.init(weights)
    updates, (_, trace, _) = chain.update(gradients, (decay, trace._replace(trace=buffers), scale), weights)
    return by_name(("weights", "buffers"), transposed(optax.apply_updates(weights, updates), trace.trace))


def declared(specs, dims, states, options, **changes):
    """The declaration that the schemes share: trees of weights, gradients and `states`; a step returns the new ones."""
    trees = ("weights", "gradients", *states)
    leaves = {f"{tree}.{name}": tree for tree in trees for name in specs}
    return dict(
        inputs=dict.fromkeys(trees, specs),
        outputs={f"{tree}_{name}": spec for name, spec in specs.items() for tree in ("weights", *states)},
        dims=dims,
        draw={leaf: values("positive" if tree == "mean_squares" else "normal") for leaf, tree in leaves.items()},
        nograd=tuple(leaves),
        options=options,
        dtypes=("float32", "float64", "bfloat16"),
        reduction=(),
        roundings=8,
        **changes,
    )


def groups(parameters, weight_decay):
    """An optimizer's groups: parameters with decay and parameters without."""
    return [
        {"params": [parameters[name] for name in parameters if name not in UNDECAYED], "weight_decay": weight_decay},
        {"params": [parameters[name] for name in parameters if name in UNDECAYED], "weight_decay": 0.0},
    ]


def adamw_step(parameters, means, mean_squares, t, lr, weight_decay, betas, result=local):
    """Step `parameters`, which have their gradients; `result` makes the returned tensor of each weight and state."""
    optimizer = torch.optim.AdamW(groups(parameters, weight_decay), lr=lr, betas=betas)
    states = {
        name: {"step": torch.tensor(t - 1.0), "exp_avg": means[name].clone(), "exp_avg_sq": mean_squares[name].clone()}
        for name in parameters
    }
    stepped(optimizer, ((parameters[name], state) for name, state in states.items()))
    after = {name: (parameters[name], state["exp_avg"], state["exp_avg_sq"]) for name, state in states.items()}
    return {name: result(x.detach()) for name, x in by_name(("weights", "means", "mean_squares"), after).items()}


def sgd_step(parameters, buffers, lr, weight_decay, momentum, nesterov):
    optimizer = torch.optim.SGD(groups(parameters, weight_decay), lr=lr, momentum=momentum, nesterov=nesterov)
    states = {name: {"momentum_buffer": buffers[name].clone()} for name in parameters}
    stepped(optimizer, ((parameters[name], state) for name, state in states.items()))
    after = {name: (parameters[name], state["momentum_buffer"]) for name, state in states.items()}
    return {name: local(x.detach()) for name, x in by_name(("weights", "buffers"), after).items()}


# DTensors over FSDP and tensor parallelism: nothing is sent.

OVER_AXES = {"mesh": {"dp": (1, 2, 3), "tp": (1, 2)}, "cost": lambda case: Cost()}


def on_mesh(mesh, weights, gradients, *states):
    place = lambda name, x: placed(x, mesh.device_mesh, LAYER[name])  # noqa: E731
    parameters = {name: weight(weights[name], gradients[name], mesh.device_mesh, LAYER[name]) for name in weights}
    return parameters, *({name: place(name, x) for name, x in state.items()} for state in states)


@scheme(reference=reference_adamw, **declared(SPECS, DIMS, ("means", "mean_squares"), ADAMW, **OVER_AXES))
def adamw_over_fsdp_and_tp(mesh, weights, gradients, means, mean_squares, t, lr, weight_decay, betas):
    return adamw_step(*on_mesh(mesh, weights, gradients, means, mean_squares), t, lr, weight_decay, betas)


@scheme(reference=reference_sgd, **declared(SPECS, DIMS, ("buffers",), SGD, **OVER_AXES))
def sgd_over_fsdp_and_tp(mesh, weights, gradients, buffers, lr, weight_decay, momentum, nesterov):
    return sgd_step(*on_mesh(mesh, weights, gradients, buffers), lr, weight_decay, momentum, nesterov)


# optax in place of our reference


@scheme(
    reference=optax_adamw,
    **declared(SPECS, DIMS, ("means", "mean_squares"), ADAMW, mesh={"dp": (1, 2), "tp": (1,)}),
)
def adamw_beside_optax(mesh, weights, gradients, means, mean_squares, t, lr, weight_decay, betas):
    return adamw_step(*on_mesh(mesh, weights, gradients, means, mean_squares), t, lr, weight_decay, betas)


@scheme(reference=optax_sgd, **declared(SPECS, DIMS, ("buffers",), SGD, mesh={"dp": (1, 2), "tp": (1,)}))
def sgd_beside_optax(mesh, weights, gradients, buffers, lr, weight_decay, momentum, nesterov):
    return sgd_step(*on_mesh(mesh, weights, gradients, buffers), lr, weight_decay, momentum, nesterov)


# FSDP2's parameters, of sizes that the ranks share unevenly or that leave some without a row

FULL = {"both": "a b dp=I", "norm": "f dp=I"}
FULL_DIMS = {"a": (1, 3, 5), "b": (2,), "f": (1, 4)}


@scheme(
    reference=reference_adamw,
    **declared(FULL, FULL_DIMS, ("means", "mean_squares"), ADAMW, mesh={"dp": (1, 2, 4, 5, 7)}),
)
@pytest.mark.cases(3, engine="gloo")
def adamw_over_fsdp2(mesh, weights, gradients, means, mean_squares, t, lr, weight_decay, betas):
    parameters = fully_sharded(mesh.device_mesh, weights, gradients)
    means, mean_squares = (
        {name: shard_of(x, parameters[name]) for name, x in tree.items()} for tree in (means, mean_squares)
    )
    return adamw_step(parameters, means, mean_squares, t, lr, weight_decay, betas, result=full)


SCHEMES = (
    adamw_over_fsdp_and_tp,
    sgd_over_fsdp_and_tp,
    adamw_beside_optax,
    sgd_beside_optax,
    adamw_over_fsdp2,
)
test_parity = parity(SCHEMES, lockstep=12)
