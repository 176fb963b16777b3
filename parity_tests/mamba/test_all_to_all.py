"""Parity of mamba.all_to_all."""

import pytest
import torch

from parity_tests.parity import parity
from parity_tests.rejections import rejected
from shardproof import CaseSpec, Cost, check, scheme
from shardproof.engines.engines import run
from torch_impl import mamba


def cost(elements):
    def declared(c):
        moved = {} if c.cp == 1 else {"all_to_all": (1, elements(c) * c.itemsize // c.cp)}
        return Cost(forward=moved, backward=moved)

    return declared


@scheme(
    reference=lambda x: x,
    mesh={"cp": (1, 2, 4)},
    contract=mamba._all_to_all_cp2hp,
    inputs={"x": "b s/cp w"},
    outputs="b s w/cp",
    cost=cost(lambda c: c.b * c.s * c.w),
)
def columns_for_tokens(mesh, x):
    return mamba._all_to_all_cp2hp(x, mesh["cp"], len(x))


@scheme(
    reference=lambda x: -x,
    mesh={"cp": (1, 2, 4)},
    contract=mamba._all_to_all_hp2cp,
    inputs={"x": "t w/cp"},
    outputs="t/cp w",
    cost=cost(lambda c: c.t * c.w),
)
def tokens_for_columns(mesh, x):
    """The caller may write to the result, also in a group of one."""
    return mamba._all_to_all_hp2cp(x, mesh["cp"], 7).neg_()  # a stream has no batch size


test_parity = parity([columns_for_tokens, tokens_for_columns], lockstep=12, gloo=3)


@pytest.mark.parametrize("declared", [columns_for_tokens, tokens_for_columns], ids=lambda declared: declared.name)
def test_a_group_of_one_gets_a_copy(declared):
    check(declared.case(cp=1).replace(conditions={"overwritten": True}))


def on_ranks(body, cp=2):
    return run(body, CaseSpec(scheme="mamba", mesh={"cp": cp})).results


def test_the_picture_of_the_page():
    def body(mesh, case):
        rank = mesh.rank("cp")
        x = 100 * rank + 10 * torch.arange(2)[:, None] + torch.arange(4)
        there = mamba._all_to_all_cp2hp(x, mesh["cp"], 1)
        return there.tolist(), mamba._all_to_all_hp2cp(there, mesh["cp"], 1).equal(x)

    assert on_ranks(body) == (
        ([[0, 1], [10, 11], [100, 101], [110, 111]], True),
        ([[2, 3], [12, 13], [102, 103], [112, 113]], True),
    )


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_twice_is_the_identity_forward_and_backward(cp):
    def body(mesh, case):
        x = torch.arange(8.0 * 3).view(8, 3).sub(mesh.rank("cp")).requires_grad_()
        y = mamba._AllToAll.apply(x.t().contiguous().t(), mesh["cp"])
        again = mamba._all_to_all(y, mesh["cp"])
        (g,) = torch.autograd.grad(y, x, y.detach(), create_graph=True)
        (gg,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(gg.sum(), x)
        return (
            torch.equal(again, x),
            torch.equal(g, x),
            torch.equal(gg, 2 * x),
            torch.equal(twice, torch.full_like(x, 2)),
        )

    assert on_ranks(body, cp) == ((True,) * 4,) * cp


cp2hp, hp2cp = mamba._all_to_all_cp2hp, mamba._all_to_all_hp2cp
X = torch.zeros(2, 3, 5)
REJECTED = [
    (lambda g: mamba._all_to_all(X[:, 0][:1], g), "_AllToAll: input_ is [1, 5]; cp=2 ranks share dim 0 equally"),
    (lambda g: mamba._all_to_all(X.sum(), g), "_AllToAll: input_ is []; cp=2 ranks share dim 0 equally"),
    (
        lambda g: cp2hp(X, g, 2),
        "cp2hp: input_ has 5 columns, which cp=2 ranks cannot share equally",
    ),
    (
        lambda g: hp2cp(X, g, 2),
        "hp2cp: input_ has 3 rows, which cp=2 ranks cannot share equally",
    ),
    (
        lambda g: cp2hp(X, g, 1),
        "cp2hp: input_ is [2, 3, 5], batch_size=1; pass batch_size=2",
    ),
    (lambda g: hp2cp(X[0, 0], g, 1), "hp2cp: input_ is [5]; it is [b, s, w] or [t, w]"),
]
test_rejection = rejected(
    {"cp": 2},
    [
        (text, lambda mesh, call=call: call(mesh["cp"]), f"mamba.{'' if text[0] == '_' else '_all_to_all_'}{text}")
        for call, text in REJECTED
    ],
)


def test_no_group_is_rejected():
    with pytest.raises(TypeError, match="cp_group is None; pass a ProcessGroup"):
        mamba._all_to_all_cp2hp(X, None, 2)
    with pytest.raises(TypeError, match="group is None; pass a ProcessGroup"):
        mamba._all_to_all(X, None)
