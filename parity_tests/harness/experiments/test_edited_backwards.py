"""Hand-written backwards that see one rank's part of a sum, and the operation that is named."""

import jax
import jax.numpy as jnp
import pytest
import torch

from parity_tests.specimens.small_scheme import summed
from parity_tests.specimens.wrong_gradients import line_of
from shardproof import scheme, token_below, values
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.experiments.notes import check_notes
from shardproof.verify_one_case import verify_case


def notes_of(function, reference, label="d/d x", **sizes):
    declaration = scheme(
        reference=reference, mesh={"tp": (1, 2, 4)}, inputs={"x": "b v/tp"}, outputs="b v/tp",
        draw={"x": values("normal")}, dtypes=("float32",),
    )(function)  # fmt: skip
    report = check_notes(declaration, verify_case(declaration, declaration.case(**sizes)))
    assert [tensor.label for tensor in report.tensors if not tensor.ok] == [label], str(report)
    return [str(note) for note in report.notes[label]]


class SoftmaxOfLocalSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        e = (x - 3.0).exp()
        p = e / summed(e.sum(-1, keepdim=True), group)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        inner = (g * p).sum(-1, keepdim=True)  # the mistake: of this rank's columns
        return p * (g - inner), None


def softmax(mesh, x):
    return SoftmaxOfLocalSum.apply(x, mesh["tp"])


@pytest.mark.usefixtures("without_line_edits")
def test_a_sum_of_each_ranks_own_part_in_a_backward():
    first = notes_of(softmax, lambda x: jax.nn.softmax(x, -1), tp=2, b=3, v=8)[0]
    place = line_of(SoftmaxOfLocalSum, "inner = ")
    assert first == f"{RIGHT_ONCE}sum at {place} is the sum over all ranks of tp, not of each rank's own part"


class NormOfLocalMeans(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, ranks):
        c = x - summed(x.mean(-1, keepdim=True), group) / ranks
        r = (summed(c.square().mean(-1, keepdim=True), group) / ranks + 0.1).rsqrt()
        ctx.save_for_backward(c * r, r)
        return c * r

    @staticmethod
    def backward(ctx, g):
        y, r = ctx.saved_tensors
        shift = g.mean(-1, keepdim=True)  # the mistake, twice
        slope = (g * y).mean(-1, keepdim=True)
        return r * (g - shift - y * slope), None, None


def norm(mesh, x):
    return NormOfLocalMeans.apply(x, mesh["tp"], mesh.size("tp"))


def norm_reference(x):
    c = x - x.mean(-1, keepdims=True)
    return c * jax.lax.rsqrt((c * c).mean(-1, keepdims=True) + 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("without_line_edits")
def test_two_means_of_each_ranks_own_part_in_a_backward():
    first = notes_of(norm, norm_reference, tp=2, b=3, v=8)[0]
    shift, slope = line_of(NormOfLocalMeans, "shift = "), line_of(NormOfLocalMeans, "slope = ")
    words = f"mean at {shift} and mean at {slope} are over all ranks of tp, not over each rank's own part"
    assert first == f"{RIGHT_ONCE}{words}"


class RowsOfTheLastId(torch.autograd.Function):
    @staticmethod
    def forward(ctx, i, table):
        ctx.save_for_backward(i)
        ctx.shape = table.shape
        return table[i]

    @staticmethod
    def backward(ctx, g):
        (i,) = ctx.saved_tensors
        rows = torch.zeros(ctx.shape, dtype=g.dtype)
        rows[i] += g  # the mistake: of equal ids the last remains
        return None, rows


@pytest.mark.usefixtures("without_line_edits")
def test_equal_ids_of_which_one_has_a_gradient():
    declaration = scheme(
        reference=lambda i, x: 1.0 * x[i], mesh={"tp": (1, 2)}, inputs={"i": "b", "x": "v d/tp"}, outputs="b d/tp",
        draw={"i": token_below("v"), "x": values("normal")}, dtypes=("float32",),
    )(lambda mesh, i, x: RowsOfTheLastId.apply(i, x))  # fmt: skip
    report = check_notes(declaration, verify_case(declaration, declaration.case(tp=2, b=8, v=3, d=4)))
    place = line_of(RowsOfTheLastId, "rows[i] +=")
    assert report.notes["d/d x"][0].startswith(f"{RIGHT_ONCE}the assignment at {place} adds: of two values for one")


class SlopePlusSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 - x.tanh() ** 2) + 0.1 * g.sum()  # the mistake, on one rank too


@pytest.mark.usefixtures("without_line_edits")
def test_no_sum_is_to_blame_where_one_rank_is_enough():
    notes = notes_of(lambda mesh, x: SlopePlusSum.apply(x), lambda x: jnp.tanh(x), tp=2, b=3, v=8)
    assert not any(RIGHT_ONCE in note for note in notes)
