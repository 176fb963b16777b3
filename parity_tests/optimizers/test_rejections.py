"""What optimizers reject, each call with words of its message, on every rank before anything is sent."""

from functools import partial

import torch
from hypothesis import given, settings
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from parity_tests.optimizers import test_clipping, test_muon, test_newton_schulz, test_parameter_kinds, test_zero1
from parity_tests.optimizers.parameters import parameter
from parity_tests.rejections import codes, declared
from shardproof import check, every_case, scheme
from torch_impl.optimizers import Muon, Zero1, clip_grad_norm_, gradient_norm, newton_schulz, parameter_kinds


def sum_to_be_computed(mesh):
    """A sharded parameter whose gradient is a partial sum."""
    created = parameter(torch.zeros(2, 2), mesh, [Shard(0)])
    created.grad = DTensor.from_local(torch.ones(2 * mesh.size(), 2), mesh, [Partial()])
    return created


def on_mesh(mesh):
    """Calls whose tensors or groups are those of a mesh."""
    sharded, partial_sum = parameter(torch.zeros(2), mesh, [Shard(0)]), sum_to_be_computed(mesh)
    elsewhere = "a gradient is (Partial(sum),), its parameter is (Shard(dim=0),)"
    return [
        (partial(clip_grad_norm_, [sharded, partial_sum], 1.0), "_: the gradient of parameters[1] is (Partial(sum),)"),
        (partial(gradient_norm, partial_sum), "gradient_norm: the gradient of parameters is (Partial(sum),)"),
        (partial(gradient_norm, test_clipping.PLAIN, pp=3), "optimizers.gradient_norm: pp"),
        (Muon([partial_sum]).step, f"Muon: {elsewhere}"),
        (partial(Zero1, [sharded], test_zero1.make_sgd, mesh), "group 0 has a DTensor; its state is sharded as it is"),
    ]


def calls(mesh):
    """The tables of the tests of each function, and what needs a mesh."""
    vector, zeros = test_clipping.PLAIN, nn.Parameter(torch.zeros(2))
    defaults = {
        clip_grad_norm_: {"parameters": [vector], "max_norm": 1.0},
        Muon: {"params": [test_muon.matrix(4, 3)]},
        Zero1: {"params": [zeros], "optimizer": test_zero1.make_sgd, "mesh": mesh},
        parameter_kinds: {"model": LINEAR},
        newton_schulz: {},
    }
    rows = [(function, *row) for function, table in TABLES.items() for row in table]
    return [
        *((partial(function, **{**defaults[function], **arguments}), words) for function, arguments, words in rows),
        *on_mesh(mesh),
    ]


LINEAR = nn.Linear(2, 2)  # here: a call of the scheme draws no numbers
TABLES = {
    clip_grad_norm_: test_clipping.REJECTED,
    Muon: test_muon.REJECTED,
    Zero1: [row for row in test_zero1.REJECTED if row[0].get("params") != "sharded"],
    parameter_kinds: test_parameter_kinds.REJECTED,
    newton_schulz: test_newton_schulz.REJECTED,
}
COUNT = sum(map(len, TABLES.values())) + 5  # those of on_mesh


@scheme(**declared("dp", (1, 2), COUNT))
def rejected_by_optimizers(mesh, ids) -> Int[Tensor, "k r/dp"]:
    return codes(ids, calls(mesh.device_mesh))


@settings(max_examples=3)
@given(every_case(rejected_by_optimizers))
def test_rejections(case):
    check(case)
