"""Modules that run their own backward: DDP, FSDP2 and hooks, with micro-batches, against one reference of the loss."""

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardproof import load_parameters, scheme, values

DRAW = {name: values("normal") for name in ("x", "parameters.up.weight", "parameters.down.weight")}


class Mlp(torch.nn.Module):
    def __init__(self, d, f, dtype):
        super().__init__()
        self.up = torch.nn.Linear(d, f, bias=False, dtype=dtype)
        self.down = torch.nn.Linear(f, d, bias=False, dtype=dtype)

    def forward(self, x):
        return (self.down(torch.nn.functional.silu(self.up(x))) ** 2).mean()


def loss(x, parameters):
    """x: [m, b, d], m micro-batches: the mean over all of them."""
    hidden = jax.nn.silu(x @ parameters["up"]["weight"].T)
    return jnp.mean((hidden @ parameters["down"]["weight"].T) ** 2)


def declared(function, up, down, **more):
    return scheme(
        reference=loss, mesh={"dp": (1, 2, 4)}, dims={"m": (1, 3)}, outputs="dp=P", draw=DRAW, module="parameters",
        inputs={"x": "m b/dp d", "parameters": {"up": {"weight": up}, "down": {"weight": down}}}, nograd=("x",),
        dtypes=("float32",), roundings=4, **more,
    )(function)  # fmt: skip


def accumulate(mesh, model, x, synchronise):
    """The loss of a rank's share, over its micro-batches; the wrapper needs `synchronise(is_last)`."""
    total = x.new_zeros(())
    for index, batch in enumerate(x):
        synchronise(index == len(x) - 1)
        part = model(batch) / len(x)
        part.backward()
        total += part.detach()
    return total / mesh.size("dp"), model


def with_ddp(mesh, x, parameters):
    model = load_parameters(Mlp(x.shape[2], parameters["up"]["weight"].shape[0], x.dtype), parameters)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])

    def synchronise(is_last):
        wrapped.require_backward_grad_sync = is_last

    return accumulate(mesh, wrapped, x, synchronise)


def with_fsdp2(mesh, x, parameters):
    with torch.device("meta"):
        model = Mlp(x.shape[2], mesh.total("f"), x.dtype)
    fully_shard(model, mesh=mesh.device_mesh)
    load_parameters(model.to_empty(device=x.device), parameters)
    return accumulate(mesh, model, x, model.set_requires_gradient_sync)


@pytest.mark.slow
def test_ddp_with_micro_batches():
    report = declared(with_ddp, "f d dp=I", "d f dp=I").verify(examples=8)
    assert report.ok, str(report)
    assert [tensor.label for tensor in report.tensors] == [
        "out",
        "d/d parameters.up.weight",
        "d/d parameters.down.weight",
    ]


@pytest.mark.slow
def test_ddp_that_never_synchronises():
    def local(mesh, x, parameters):
        model = load_parameters(Mlp(x.shape[2], parameters["up"]["weight"].shape[0], x.dtype), parameters)
        return accumulate(mesh, model, x, lambda is_last: None)

    assert declared(local, "f d dp=I", "d f dp=I").verify(examples=8).verdict == "mismatch"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_fsdp2_with_micro_batches(engine):
    """Shards of dim 0, whose sizes are multiples of dp here."""
    report = declared(with_fsdp2, "f/dp d", "d/dp f", assume=lambda case: case.d % case.dp == 0).verify(
        engine=engine, examples=4
    )
    assert report.ok, str(report)


@pytest.mark.slow
def test_a_hook_that_averages_the_accumulated_gradient_at_each_micro_batch():
    """A defect of real plans: the first of m micro-batches is averaged m times."""

    def average_each_time(mesh, x, parameters):
        model = load_parameters(Mlp(x.shape[2], parameters["up"]["weight"].shape[0], x.dtype), parameters)

        def average(parameter):
            torch.distributed.all_reduce(parameter.grad, group=mesh["dp"])
            parameter.grad /= mesh.size("dp") if mesh.size("dp") < 4 else 2

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)
        return accumulate(mesh, model, x, lambda is_last: None)

    report = declared(average_each_time, "f d dp=I", "d f dp=I").verify(examples=12)
    assert report.verdict == "mismatch" and report.case.dp == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"module": "weights"}, "module is 'weights'; name the input that is a tree of parameters (parameters)"),
        ({"outputs": "b/dp"}, "module='parameters': the first output is the loss, a scalar such as 'dp=I'; got 'b/dp'"),
    ],
)
def test_wrong_declarations(changes, words):
    with pytest.raises(ValueError) as caught:
        scheme(
            **{
                "reference": lambda x, parameters: x, "mesh": {"dp": (2,)}, "outputs": "dp=I", "module": "parameters",
                "inputs": {"x": "b/dp", "parameters": {"w": "b dp=I"}}, **changes,
            }
        )(with_ddp)  # fmt: skip
    assert str(caught.value) == f"scheme 'with_ddp': {words}"


def test_parameters_that_do_not_fit():
    with pytest.raises(ValueError, match=r"the module has \(weight\), the tree has \(w\)"):
        load_parameters(torch.nn.Linear(2, 3, bias=False), {"w": torch.ones(3, 2)})
    with pytest.raises(ValueError, match=r"'weight' is \(3, 2\) on this rank, the tree has \(2, 3\)"):
        load_parameters(torch.nn.Linear(2, 3, bias=False), {"weight": torch.ones(2, 3)})
