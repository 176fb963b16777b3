"""Values in another order because of the way in which a function is called, which no layout explains."""

import jax.numpy as jnp
import pytest
import torch

from parity_tests.specimens.noted_scheme import declared, notes
from shardproof import permutation, values, verify_one_case


@pytest.mark.slow
def test_a_wrong_order_may_come_from_the_other_call(monkeypatch):
    """A cached permutation: the layout is right, the order is the first call's."""
    orders = {}
    run = verify_one_case.run
    monkeypatch.setattr(verify_one_case, "run", lambda *args, **more: (orders.clear(), run(*args, **more))[1])

    def sorted_rows(mesh, x, key):
        return x[orders.setdefault((mesh.rank("tp"), x.shape), key.argsort())]

    declaration = declared(
        sorted_rows, lambda x, key: x[jnp.argsort(key)], {"x": "b d tp=I", "key": "b"}, "b d tp=I",
        draw={"x": values("normal"), "key": permutation()}, engines=("lockstep",), dims={"b": (1, 8), "d": (4,)},
    )  # fmt: skip
    of_all = notes(declaration.verify(examples=60))
    assert "same values in another order, the order of the other call" in of_all[0], of_all
    assert not any("not undone" in note for note in of_all)


def test_a_wrong_order_may_be_that_of_memory():
    """A cotangent that is a transposed view, read as if it were contiguous: no layout is to blame."""

    class AsInMemory(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            return gradient.as_strided(gradient.shape, gradient.new_empty(gradient.shape).stride())

    declaration = declared(
        lambda mesh, x: AsInMemory.apply(x), lambda x: 1.0 * x, "b d tp=I", "b d tp=I", dims={"b": (3,), "d": (4,)}
    )
    of_gradient = declaration.verify(examples=40).notes["d/d x"]
    assert (
        of_gradient[0] == "same values in another order, the order of memory: a view is read as if it were contiguous"
    )
