"""models.gradient_norm: one number for every way to cut a gradient."""

import re
from fractions import Fraction

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parity_tests import CaseSpec, check, every_case, scheme, values
from parity_tests.harness.run.engines import run
from torch_impl.models import gradient_norm


def whole_norm(gradients):
    return jnp.sqrt(sum((x**2).sum() for x in gradients.values()))


# How DTensor says that an axis of the mesh (dp, tp) cuts or repeats each.
CUT = {"both": (Shard(0), Shard(1)), "rows": (Shard(0), Replicate()), "columns": (Replicate(), Shard(0))}


@scheme(
    reference=whole_norm,
    mesh={"dp": (1, 2, 3), "tp": (1, 2)},
    inputs={"gradients": {"both": "a/dp b/tp", "rows": "e/dp tp=I", "columns": "f/tp dp=I", "repeated": "o dp=I tp=I"}},
    outputs="dp=I tp=I",
    dims={"a": (6,), "b": (2,), "e": (6,), "f": (4,), "o": (1, 3)},
    draw={f"gradients.{name}": values("normal", "zeros", "ties") for name in (*CUT, "repeated")},
    nograd=tuple(f"gradients.{name}" for name in (*CUT, "repeated")),
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("a", "b", "e"),
)
def norm_of_cut_gradients(mesh, gradients):
    made = []
    for name, local in gradients.items():
        placements = list(CUT.get(name, (Replicate(), Replicate())))
        made.append(nn.Parameter(DTensor.from_local(torch.zeros_like(local), mesh.device_mesh, placements)))
        made[-1].grad = DTensor.from_local(local, mesh.device_mesh, placements)
    return gradient_norm(made)


@settings(max_examples=20)
@given(every_case(norm_of_cut_gradients))
def test_parity(case):
    check(case)


# Squares of whole numbers add up exactly, in any order.
GRADIENTS = [torch.arange(-4.0, 8.0).view(6, 2), torch.arange(5.0), torch.tensor([[3.0]])]
SQUARE = sum(Fraction(float(each.square().sum())) for each in GRADIENTS)


def parameter(gradient, mesh, placements):
    made = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    made.grad = distribute_tensor(gradient, mesh, placements)
    return made


@pytest.mark.parametrize(
    "placements",
    [
        [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())],
        [(Replicate(), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate())],
    ],
)
@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}])
def test_what_is_cut_is_summed_and_what_is_repeated_is_not(mesh, placements):
    def body(mesh, case):
        cut = [parameter(x, mesh.device_mesh, list(p)) for x, p in zip(GRADIENTS, placements, strict=True)]
        plain, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        plain.grad = torch.tensor([0.0, 2.0])
        return gradient_norm([*cut, plain, without]).item()

    found = run(body, CaseSpec(scheme="norm", mesh=mesh)).results
    assert set(found) == {torch.tensor(float(SQUARE + 4)).sqrt().item()}


def test_equal_meshes_are_one():
    """DTensor's caches may give a gradient either of two equal meshes, not the same on every rank."""

    def body(mesh, case):
        again = init_device_mesh(mesh.device_mesh.device_type, (2,), mesh_dim_names=("dp",))
        places = [mesh.device_mesh, again if mesh.rank("dp") else mesh.device_mesh]
        return gradient_norm([parameter(torch.ones(4), place, [Shard(0)]) for place in places]).item()

    found = run(body, CaseSpec(scheme="norm", mesh={"dp": 2}))
    assert set(found.results) == {torch.tensor(8.0).sqrt().item()}
    assert sum(row.op == "all_reduce" for row in found.ledger.of(0)) == 1


def test_addends_are_refused():
    def body(mesh, case):
        made = nn.Parameter(distribute_tensor(torch.zeros(2), mesh.device_mesh, [Replicate()]))
        made.grad = DTensor.from_local(torch.ones(2), mesh.device_mesh, [Partial()])
        with pytest.raises(ValueError, match=re.escape("a gradient is (Partial(sum),); reduce it first")):
            gradient_norm([made])

    run(body, CaseSpec(scheme="norm", mesh={"tp": 2}))


def test_narrow_gradients_are_summed_wide():
    made = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    made.grad = torch.ones_like(made)
    assert gradient_norm([made]).item() == 64.0
