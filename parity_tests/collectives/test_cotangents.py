"""Cotangents and inputs of any strides: expanded, transposed, sliced; none is written to, none is kept alive."""

import numpy as np
import pytest
import torch

from parity_tests.collectives.operations import OPERATIONS
from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.engines import run

THREE = CaseSpec(scheme="collectives", mesh={"x": 3})
STRIDES = {
    "expanded": lambda t: t[:1, :1].expand(t.shape) if t.numel() else t,
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: t.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_strides_change_nothing(operation, strides):
    def body(mesh, case):
        group = mesh["x"]
        rank = group.rank()
        numbers = torch.arange(1.0, 1.0 + np.prod(operation.shape(rank, 3))).reshape(operation.shape(rank, 3))
        odd = STRIDES[strides](numbers)
        results = []
        for x in (odd.clone(memory_format=torch.contiguous_format), odd.clone(), odd):
            x = x.detach().requires_grad_()
            y = operation.call(x, group)
            cotangent = STRIDES[strides](torch.ones_like(y).cumsum(0) + (0 if operation.out == "I" else rank))
            copy = cotangent.clone(memory_format=torch.contiguous_format)
            if x.is_contiguous():
                cotangent = copy.clone()
            (gradient,) = torch.autograd.grad(y, x, cotangent)
            results.append((y.detach().numpy(), gradient.numpy().copy(), torch.equal(cotangent, copy)))
        return results

    for first, *rest in run(body, THREE).results:
        for other in rest:
            np.testing.assert_array_equal(other[0], first[0])
            np.testing.assert_array_equal(other[1], first[1])
            assert other[2] and first[2]


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_gradient_shares_no_memory_with_the_cotangent(operation):
    def body(mesh, case):
        group = mesh["x"]
        x = torch.zeros(operation.shape(group.rank(), 3)).requires_grad_()
        y = operation.call(x, group)
        cotangent = torch.ones_like(y)
        y.backward(cotangent)
        x.grad.fill_(7.0)
        return bool((cotangent == 1.0).all())

    assert all(run(body, THREE).results)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_second_derivative_is_rejected(operation):
    def body(mesh, case):
        group = mesh["x"]
        x = torch.ones(operation.shape(group.rank(), 3)).requires_grad_()
        y = operation.call(x, group)
        cotangent = torch.ones_like(y).requires_grad_()
        (gradient,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
        if not gradient.requires_grad:
            return "no graph"
        try:
            gradient.sum().backward()
        except RuntimeError as error:
            return str(error).splitlines()[0]

    messages = set(run(body, THREE).results)
    assert messages == {"trying to differentiate twice a function that was marked with @once_differentiable"}
