"""Cotangents and inputs may have any strides; no operation writes to a cotangent or returns its memory."""

import numpy as np
import pytest
import torch

from parity_tests.collectives.operations import OPERATIONS
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run

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


def linear_map(operation, world):
    """The matrix from the ranks' inputs, joined, to their joined results, or to one copy of a result of type I."""
    shapes = [operation.shape(rank, world) for rank in range(world)]
    columns = []
    for unit in np.eye(sum(int(np.prod(shape)) for shape in shapes)):
        parts = np.split(unit, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1])
        results = operation.means([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])
        columns.append(np.concatenate([y.ravel() for y in (results[:1] if operation.out == "I" else results)]))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_gradient_is_differentiable_again(operation):
    """y = M x, g = M^T 3 y^2, and the gradient of |g|^2 by x is M^T (6 y * M 2 g): integers, so equal to the bit."""

    def body(mesh, case):
        group = mesh["x"]
        x = integers[group.rank()].clone().requires_grad_()
        y = operation.call(x, group)
        (g,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(g.square().sum(), x)
        return g.detach().numpy(), second.numpy()

    generator = torch.Generator().manual_seed(0)
    shapes = [operation.shape(rank, 3) for rank in range(3)]
    integers = [torch.randint(-3, 4, shape, generator=generator).double() for shape in shapes]
    matrix = linear_map(operation, 3)
    x = np.concatenate([t.numpy().ravel() for t in integers])
    y = matrix @ x
    g = matrix.T @ (3 * y**2)
    second = matrix.T @ (6 * y * (matrix @ (2 * g)))
    results = run(body, THREE).results
    for number, want in enumerate((g, second)):
        np.testing.assert_array_equal(np.concatenate([of_rank[number].ravel() for of_rank in results]), want)
