"""The law of every collective: its backward is its adjoint, <A x, c> = <x, A^T c>, exactly; and NumPy's meaning.

A pairing sums over ranks where the ranks' tensors are terms of one whole (V, P, R), and counts one rank where
they are the same thing said by each (I). Integer values make all sums exact.
"""

import numpy as np
import pytest
import torch

from parity_tests.collectives.operations import OPERATIONS
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run

WORLDS = (1, 2, 3, 4)


def integers(shape, seed, dtype):
    rng = np.random.Generator(np.random.Philox(key=[seed, 0]))
    return torch.from_numpy(rng.integers(-4, 5, size=shape)).to(dtype)


def stacked(rank, world, operation, dtype):
    return integers(operation.shape(rank, world), rank, dtype)


def contiguous(x):
    return x


def every_other(x):
    """The same values, with gaps between them."""
    return torch.stack([x, x + 1], -1)[..., 0]


def transposed(x):
    """The same values, in the order of their columns."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def expanded(x):
    """Ones in the place of all values, as `.sum().backward()` has them."""
    return torch.ones((), dtype=x.dtype).expand(x.shape)


def one_rank(operation, dtype, of_input=contiguous, of_cotangent=contiguous):
    """One forward and one backward on one rank; everything returned is NumPy."""

    def body(mesh, case):
        group, world = mesh["x"], case.world
        x = of_input(stacked(group.rank(), world, operation, dtype)).requires_grad_()
        before = x.detach().clone()
        y = operation.call(x, group)
        seed = 100 if operation.out == "I" else 100 + group.rank()  # for I the ranks pass the same cotangent
        cotangent = of_cotangent(integers(y.shape, seed, dtype))
        expected = cotangent.clone()
        (gradient,) = torch.autograd.grad(y, x, cotangent)
        untouched = torch.equal(x, before) and torch.equal(cotangent, expected)
        facts = [y.dtype == gradient.dtype == dtype, y.is_contiguous(), untouched]
        return [t.detach().double().numpy() for t in (x, y, cotangent, gradient)], all(facts)

    return body


def on_ranks(operation, dtype, world, engine, *strides):
    case = CaseSpec(scheme="collectives", mesh={"x": world}, engine=engine)
    return run(one_rank(operation, dtype, *strides), case, engine)


def check_law(operation, ranks):
    xs, ys, cotangents, gradients = zip(*(arrays for arrays, _ in ranks.results), strict=True)
    for got, want in zip(ys, operation.means(list(xs)), strict=True):
        np.testing.assert_array_equal(got, want)
    assert all(fine for _, fine in ranks.results)
    products = [np.vdot(y, c) for y, c in zip(ys, cotangents, strict=True)]
    forward = products[0] if operation.out == "I" else sum(products)
    assert forward == sum(np.vdot(x, g) for x, g in zip(xs, gradients, strict=True))


@pytest.mark.fast_values(19)
@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("strides", [(every_other, every_other), (transposed, transposed), (contiguous, expanded)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_any_strides(operation, strides, engine):
    ranks = on_ranks(operation, torch.float32, 3, engine, *strides)
    check_law(operation, ranks)
    assert [row.rejected for row in ranks.ledger.rows if row.rejected] == []


@pytest.mark.fast_values(56)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_backward_is_the_adjoint(operation, world, dtype):
    check_law(operation, on_ranks(operation, dtype, world, "lockstep"))


@pytest.mark.fast_values(13)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_backward_is_the_adjoint_on_gloo(operation, world):
    check_law(operation, on_ranks(operation, torch.float32, world, "gloo"))


@pytest.mark.fast_values(31)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_cost_is_as_declared(operation, world, dtype):
    ledger = on_ranks(operation, dtype, world, "lockstep").ledger
    for rank in range(world):
        declared = operation.cost(rank, world, dtype.itemsize, max(dtype.itemsize, 4))
        assert (ledger.cost(rank, "fwd"), ledger.cost(rank, "bwd")) == declared


def gradient_on_every_rank(operation, world):
    """The gradient of rank r for the cotangent that is one at one place of rank s: the matrix A^T, column by column."""

    def body(mesh, case):
        group = mesh["x"]
        x = stacked(group.rank(), world, operation, torch.float64).requires_grad_()
        y = operation.call(x, group)
        columns = []
        for source in range(world):
            hot = torch.full_like(y, 1.0 if source == group.rank() else 0.0)
            columns.append(torch.autograd.grad(y, x, hot, retain_graph=True)[0].numpy())
        return columns

    return run(body, CaseSpec(scheme="collectives", mesh={"x": world})).results


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.out == "R"], ids=str)
def test_cotangents_of_a_replicated_result_add_up(operation):
    outcome = on_ranks(operation, torch.float64, 3, "lockstep")
    pieces = gradient_on_every_rank(operation, 3)
    for rank, columns in enumerate(pieces):
        ones = sum(columns)
        reached = operation.name.startswith("broadcast") and rank != 2
        np.testing.assert_array_equal(ones, np.full(outcome.results[rank][0][0].shape, 0.0 if reached else 3.0))
