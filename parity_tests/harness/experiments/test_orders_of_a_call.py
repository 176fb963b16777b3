"""Wrong values because of the way in which a function is called: another order, what another call has kept."""

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


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_what_another_call_writes_into_a_kept_buffer(factor):
    """A forward before the backward replaces what was saved, which no pattern tells. A wrong factor needs no call."""
    buffers = {}

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rank):
            kept = buffers.setdefault((rank, x.shape, x.dtype), torch.empty_like(x))
            kept.data.copy_(x)
            ctx.save_for_backward(kept)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * factor * gradient * ctx.saved_tensors[0], None

    declaration = declared(
        lambda mesh, x: Square.apply(x, mesh.rank("tp")), lambda x: x * x, "b d/tp", "b d/tp", engines=("lockstep",)
    )
    report = declaration.verify(examples=60)
    said = "right without the other call: state that depends on its sizes or values is kept between calls"
    assert (report.notes["d/d x"][0] == said) == (factor == 1.0), str(report)
