"""The operation whose backward first makes NaN or infinity: named where it is to blame, and only there."""

import jax.numpy as jnp
import torch
from torch.distributed.tensor import DTensor, Replicate

from parity_tests.specimens.wrong_gradients import line_of
from shardproof import scheme, values
from shardproof.experiments.first_overflow import FIRST_MADE_BY
from shardproof.experiments.overflowing_gradients import name_overflowing_gradients
from shardproof.verify_one_case import verify_case


def first_note(function, reference, kind, **more):
    declaration = scheme(
        reference=reference,
        mesh={"tp": (1, 2)},
        dtypes=("float32",),
        inputs={"x": "n/tp v"},
        draw={"x": values("normal", kind)},
        **more,
    )(function)
    drawn = declaration.case(tp=2, n=4, v=3)
    report = verify_case(declaration, drawn.replace(values={"x": {"kind": kind}}))
    assert not report.ok and report.failure is None, str(report)
    return str(name_overflowing_gradients(declaration, report, report.notes)["d/d x"][0])


def norm_of_rows(mesh, x):
    squares = (x**2).sum(-1)
    return squares.sqrt()


def norm_of_rows_without_gradient_at_zero(x):
    squares = (x**2).sum(-1)
    return jnp.where(squares == 0.0, 0.0, jnp.sqrt(jnp.where(squares == 0.0, 1.0, squares)))


def test_a_root_at_zero():
    note = first_note(norm_of_rows, norm_of_rows_without_gradient_at_zero, "zeros", outputs="n/tp")
    line = line_of(norm_of_rows, "sqrt")
    assert note.startswith("not finite first at ") and note.endswith(f"; {FIRST_MADE_BY}the backward of sqrt at {line}")


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, squares):
        ctx.save_for_backward(squares)
        return squares.sqrt()

    @staticmethod
    def backward(ctx, cotangent):
        (squares,) = ctx.saved_tensors
        slope = 0.5 / squares.sqrt()
        return cotangent * slope


def root_by_hand(mesh, x):
    return Root.apply((x**2).sum(-1))


def test_a_division_by_zero_in_a_handwritten_backward():
    note = first_note(root_by_hand, norm_of_rows_without_gradient_at_zero, "zeros", outputs="n/tp")
    assert note.endswith(f"; {FIRST_MADE_BY}div at {line_of(Root.backward, '0.5 /')}")


def scaled_by_infinity(mesh, x):
    return (x * 0.0 + 1.0).log() + x.detach() + (x - x.detach()) * 1e30 * 1e30


def test_a_factor_that_overflows():
    note = first_note(scaled_by_infinity, lambda x: 1.0 * x, "normal", outputs="n/tp v")
    assert note.endswith(f"; {FIRST_MADE_BY}the backward of mul at {line_of(scaled_by_infinity, '1e30')}")


def root_of_a_factor(mesh, x):
    """The factor is broadcast, and the gradient of a product with it is a sum."""
    return ((x[:1] * 0.0).sum().sqrt() * x).detach() + x - (x[:1] * 0.0 * x).sqrt()


def test_a_factor_that_is_broadcast():
    note = first_note(root_of_a_factor, lambda x: 1.0 * x, "normal", outputs="n/tp v")
    assert note.endswith(f"; {FIRST_MADE_BY}the backward of sqrt at {line_of(root_of_a_factor, 'sqrt')}")


def of_a_dtensor(mesh, x):
    placed = DTensor.from_local(x, mesh.device_mesh["tp"], [Replicate()])
    return (placed**2).sum(-1).sqrt().to_local()


def test_dtensors_are_passed_over():
    """Their gradients are not plain tensors: no operation is named, and the case does not fail otherwise."""
    note = first_note(of_a_dtensor, norm_of_rows_without_gradient_at_zero, "zeros", outputs="n/tp")
    assert note.startswith("not finite first at ") and "raised" not in note


def doubled(mesh, x):
    return 2.0 * x


def test_no_note_where_every_gradient_is_finite():
    assert FIRST_MADE_BY not in first_note(doubled, lambda x: 1.0 * x, "normal", outputs="n/tp v")
