"""Parity of async_linear: linear layers whose products overlap with a ring of transfers."""

import jax
import pytest
import torch
import torch.nn.functional as F

from jax_ref.parallelizer import linear
from parity_tests.parity import parity
from parity_tests.rejections import rejected
from parity_tests.slow import slow_but
from shardproof import CaseSpec, Cost, check_cases, scheme, values
from shardproof.engines.engines import run
from torch_impl.collectives import all_gather, reduce_scatter
from torch_impl.parallelizer import all_gather_linear, linear_reduce_scatter
from torch_impl.parallelizer.async_linear import all_gather_linears

DECLARED = dict(
    dims={"s": (8, 24), "i": (4, 8), "o": (8, 4)},
    draw=dict.fromkeys(("x", "weight"), values("normal", "ties")),
    dtypes=("float32", "bfloat16", "float64", "float16"),
)


def ring(calls, size):
    """Sends and recvs of blocks of one size, none in a group of one."""
    return {"send": (calls, calls * size), "recv": (calls, calls * size)} if calls else {}


def gather_cost(c):
    elements = c.b * c.s // c.tp * c.i
    forward, wide = ring(c.tp - 1, elements * c.itemsize), ring(c.tp - 1, elements * c.accumulator_itemsize)
    return Cost(forward, {op: (2 * wide[op][0], wide[op][1] + forward[op][1]) for op in wide})


@scheme(
    reference=linear,
    contract=all_gather_linear,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "b s/tp i", "weight": "o/tp i"},
    outputs="b s o/tp",
    reduction=("i", "o", "s"),
    roundings=3,  # the result, a rank's term of d x, a block's term of d weight
    cost=gather_cost,
    **DECLARED,
)
def column_parallel(mesh, x, weight):
    return all_gather_linear(x, weight, mesh["tp"])


def scatter_cost(c):
    elements = c.b * c.s // c.tp * c.o
    return Cost(
        ring(c.tp - 1, elements * c.accumulator_itemsize),
        ring(c.tp - 1, elements * c.itemsize),
    )


@scheme(
    reference=linear,
    contract=linear_reduce_scatter,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "b s i/tp", "weight": "o i/tp"},
    outputs="b s/tp o",
    reduction=("i", "o", "s"),
    roundings=3,  # a rank's term of the result, the result, a block's term of d weight
    cost=scatter_cost,
    **DECLARED,
)
def row_parallel(mesh, x, weight):
    return linear_reduce_scatter(x, weight, mesh["tp"])


def mlp(x, up, down):
    return linear(jax.nn.silu(linear(x, up)), down)


@scheme(
    reference=mlp,
    mesh={"tp": (1, 2, 3, 8)},
    inputs={"x": "b s/tp:ragged d", "up": "f/tp d", "down": "d f/tp"},
    outputs="b s/tp:ragged d",
    dims={"s": (1, 5, 12), "f": (24,), "d": (4, 6)},
    draw=dict.fromkeys(("x", "up", "down"), values("normal")),
    dtypes=("float64", "float32", "bfloat16"),
    reduction=("d", "f", "s"),
    roundings=6,
)
def mlp_of_unequal_shards(mesh, x, up, down):
    """Ranks have unequally many positions, or none."""
    counts = all_gather(torch.tensor([x.shape[1]]), mesh["tp"], out="I").tolist()
    hidden = F.silu(all_gather_linear(x, up, mesh["tp"], lengths=counts))
    return linear_reduce_scatter(hidden, down, mesh["tp"], lengths=counts)


SCHEMES = column_parallel, row_parallel, mlp_of_unequal_shards


@pytest.mark.parametrize(
    "declared", slow_but([column_parallel, row_parallel], SCHEMES), ids=lambda declared: declared.name
)
def test_parity(declared):
    check_cases(declared, 20)


test_parity_on_processes = pytest.mark.slow(parity(SCHEMES, gloo=4))


def whole_numbers(*shape):
    return torch.arange(torch.Size(shape).numel()).remainder(7).sub(3).double().view(shape)


def gradients(value, *leaves):
    """The value, and the gradients of a loss that weighs its elements."""
    (value * whole_numbers(*value.shape)).sum().backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("tp", [1, 3])
def test_equal_to_the_collective_and_the_product(tp):
    """Equal to the bit: the values are whole numbers, and rounding does not depend on the order of their sums."""

    def leaves(*shapes):
        return [whole_numbers(*shape).add(1).requires_grad_() for shape in shapes]

    def body(mesh, case):
        group = mesh["tp"]
        x, weight = leaves((2, 4, 5), (3, 5))
        plain = gradients(F.linear(all_gather(x, group, out="R", dim=1), weight), x, weight)
        x, weight = leaves((2, 4, 5), (3, 5))
        same = gradients(all_gather_linear(x, weight, group), x, weight)
        x, weight = leaves((2, 4 * tp, 5), (3, 5))
        plain += gradients(reduce_scatter(F.linear(x, weight), group, dim=1), x, weight)
        x, weight = leaves((2, 4 * tp, 5), (3, 5))
        same += gradients(linear_reduce_scatter(x, weight, group), x, weight)
        return all(map(torch.equal, plain, same)), len(same)

    assert run(body, CaseSpec(scheme="async", mesh={"tp": tp})).results == ((True, 6),) * tp


def test_gradients_of_several_products_are_added_in_float32():
    """256 + 1 + 1: bfloat16 can hold the sum, 258, but not 257."""

    def body(mesh, case):
        x = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
        weights = [torch.full((1, 1), each, dtype=torch.bfloat16) for each in (256.0, 1.0, 1.0)]
        sum(all_gather_linears(x, weights, mesh["tp"], [1])).sum().backward()
        return x.grad.item()

    assert run(body, CaseSpec(scheme="async", mesh={"tp": 1})).results == (258.0,)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_argument_sends_nothing_for_itself(frozen):
    def body(mesh, case):
        x, weight = torch.ones(1, 4, 6), torch.ones(3, 6)
        (weight if frozen == "x" else x).requires_grad_()
        all_gather_linear(x, weight, mesh["tp"]).sum().backward()
        return weight.grad is None, x.grad is None

    done = run(body, CaseSpec(scheme="async", mesh={"tp": 2}))
    assert done.results == ((frozen == "weight", frozen == "x"),) * 2
    shard = 4 * 6 * 4
    assert done.ledger.cost(0, "bwd")["send"] == (1, shard)


X, WEIGHT = torch.zeros(1, 4, 6), torch.zeros(3, 6)
test_rejection = rejected(
    {"tp": 2},
    [
        (
            "another dtype",
            lambda mesh: all_gather_linear(X, WEIGHT.double(), mesh["tp"]),
            "parallelizer.all_gather_linear: weight is float64 but x is float32; convert one of them",
        ),
        (
            "other features",
            lambda mesh: linear_reduce_scatter(X, WEIGHT[:, :5], mesh["tp"]),
            "parallelizer.linear_reduce_scatter: weight is [3, 5] but x has i/tp=6: i/tp differs, 5 and 6",
        ),
        (
            "an odd sequence",
            lambda mesh: linear_reduce_scatter(X[:, :3], WEIGHT, mesh["tp"]),
            "parallelizer.linear_reduce_scatter: dim 1 has 3 positions, which 2 ranks cannot share equally; "
            "pass lengths",
        ),
        (
            "lengths of three ranks",
            lambda mesh: all_gather_linear(X, WEIGHT, mesh["tp"], lengths=[4, 4, 4]),
            "parallelizer.all_gather_linear: lengths=[4, 4, 4] has 3 entries for 2 ranks",
        ),
    ],
)
