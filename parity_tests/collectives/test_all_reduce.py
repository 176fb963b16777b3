"""Properties of all_reduce and all_reduce_max beyond the adjoint identity of test_adjoint."""

import numpy as np
import pytest
import torch

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.collectives import all_reduce, all_reduce_max, reduce_scatter

THREE = CaseSpec(scheme="collectives", mesh={"x": 3})


def test_narrow_dtypes_are_summed_in_float32():
    def body(mesh, case):
        rank = mesh.rank("x")
        x = torch.tensor([256.0 if rank == 0 else 1.0] * 3, dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
        x.requires_grad_()
        summed = all_reduce(x, mesh["x"], out="R")
        scattered = reduce_scatter(x, mesh["x"])
        (gradient,) = torch.autograd.grad(summed, x, x.detach())
        return summed.detach().float().numpy(), scattered.detach().float().numpy(), gradient.float().numpy()

    for summed, scattered, gradient in run(body, THREE).results:
        np.testing.assert_array_equal(summed, [258.0] * 3)
        np.testing.assert_array_equal(scattered, [258.0])
        np.testing.assert_array_equal(gradient, [258.0] * 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_maximum_is_exact_and_has_no_gradient(dtype):
    def body(mesh, case):
        x = torch.tensor([[-3.0, 1.0, -torch.inf], [0.5, 2.0, 7.0]], dtype=dtype) * (mesh.rank("x") - 1)
        x = x.nan_to_num(nan=-5.0).requires_grad_()
        before = x.detach().clone()
        largest = all_reduce_max(x.t(), mesh["x"])
        assert torch.equal(x, before)
        return x.detach().double().numpy(), largest.double().numpy(), largest.requires_grad, largest.dtype == dtype

    results = run(body, THREE).results
    for _, largest, requires_grad, same_dtype in results:
        np.testing.assert_array_equal(largest, np.max([x for x, *_ in results], axis=0).T)
        assert (requires_grad, same_dtype) == (False, True)


def test_the_maximum_costs_one_all_reduce_in_its_own_dtype():
    def body(mesh, case):
        all_reduce_max(torch.zeros(2, 3, dtype=torch.bfloat16), mesh["x"])

    ledger = run(body, THREE).ledger
    assert [ledger.cost(rank, "fwd") for rank in range(3)] == [{"all_reduce": (1, 12)}] * 3
    assert {row.reduce_op for row in ledger.rows} == {"MAX"}


def test_integers_are_summed_as_integers():
    def body(mesh, case):
        big = torch.tensor([2**53 + 1, -mesh.rank("x")])  # not representable in any float
        return all_reduce(big, mesh["x"]).numpy()

    for total in run(body, THREE).results:
        np.testing.assert_array_equal(total, [3 * 2**53 + 3, -3])
