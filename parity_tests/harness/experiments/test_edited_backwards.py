"""Mistakes in hand-written backwards, and the operation or the edit of a line that is named."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import summed
from parity_tests.specimens.wrong_gradients import line_of
from shardproof import scheme, token_below, values
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.experiments.notes import check_notes
from shardproof.verify_one_case import verify_case

INPUTS, MESH = {"x": "b v/tp"}, {"tp": (1, 2, 4)}


def notes_of(function, reference, label="d/d x", inputs=INPUTS, outputs="b v/tp", mesh=MESH, **sizes):
    draw = {name: values("normal") for name in inputs}
    declaration = scheme(
        reference=reference, mesh=mesh, inputs=inputs, outputs=outputs, draw=draw, dtypes=("float32",)
    )(function)
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


class ScatterOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group).chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, g):
        parts = [torch.zeros_like(g) for _ in range(ctx.group.size())]
        parts[ctx.group.rank()] = g
        return torch.cat(parts), None  # the mistake: other ranks' parts are zeros


def scatter_of_sum(mesh, x):
    return ScatterOfSum.apply(x.square().sum(-1), mesh["tp"])


@pytest.mark.usefixtures("without_line_edits")
def test_zeros_in_a_backward_where_other_ranks_have_gradients():
    first = notes_of(scatter_of_sum, lambda x: (x**2).sum(-1), outputs="b/tp", tp=2, b=4, v=8)[0]
    place = line_of(ScatterOfSum, "torch.cat")
    assert first == f"{RIGHT_ONCE}cat at {place} is the sum over all ranks of tp, not of each rank's own part"


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
def test_a_gradient_for_only_one_of_equal_ids():
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


def rows_of_the_rank(x, group, by):
    parts = [torch.empty(x.shape) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts[(dist.get_rank(group) - by) % len(parts)]


class RowsOfAnotherRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, by):
        ctx.group, ctx.by = group, by
        return rows_of_the_rank(x, group, by)

    @staticmethod
    def backward(ctx, g):
        return rows_of_the_rank(g, ctx.group, ctx.by), None, None  # the mistake: the same direction


def add_previous_rank(mesh, x):
    return torch.tanh(x + 2 * torch.cat([RowsOfAnotherRank.apply(x[-1:], mesh["tp"], 1), x[:-1]]))


def test_a_gradient_that_travels_in_the_direction_of_the_forward():
    note = notes_of(
        add_previous_rank, lambda x: jnp.tanh(x + 2 * jnp.roll(x, 1, 0)), mesh={"tp": (1, 2, 3, 4)}, tp=3, b=3, v=3,
        inputs={"x": "b/tp v"}, outputs="b/tp v",
    )[0]  # fmt: skip
    line = line_of(RowsOfAnotherRank.backward, "rows_of_the_rank")
    right = "rows_of_the_rank(g, ctx.group, -ctx.by)"
    assert note.startswith(f"{RIGHT_ONCE}{line} has `({right}, None, None)`, not `")


class GradientsOfAHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        halo = rows_of_the_rank(x[-1:], group, 1)
        return torch.cat([halo, x])

    @staticmethod
    def backward(ctx, g):
        own = g[1:].clone()
        own[:1] += rows_of_the_rank(g[:1], ctx.group, -1)  # the mistake: of the last row
        return own, None


def add_previous_row(mesh, x):
    padded = GradientsOfAHalo.apply(x, mesh["tp"])
    return torch.tanh(padded[1:] + 2 * padded[:-1])


def test_a_gradient_added_to_the_wrong_rows():
    note = notes_of(
        add_previous_row, lambda x: jnp.tanh(x + 2 * jnp.roll(x, 1, 0)), tp=2, b=6, v=3, inputs={"x": "b/tp v"},
        outputs="b/tp v",
    )[0]  # fmt: skip
    line = line_of(GradientsOfAHalo.backward, "own[:1] +=")
    assert note.startswith(f"{RIGHT_ONCE}{line} has `own[-1:]`, not `own[:1]`")


class SumOfRanksAndOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        total = g.clone()
        dist.all_reduce(total, group=ctx.group)
        if dist.get_rank(ctx.group) == 0:
            total = total + g  # the mistake
        return total, None


def column_parallel(mesh, x, w):
    if mesh.size("tp") == 1:
        return torch.tanh(x @ w)
    return torch.tanh(SumOfRanksAndOwn.apply(x, mesh["tp"]) @ w)


def test_a_line_says_more_than_the_condition_above_it():
    note = notes_of(
        column_parallel, lambda x, w: jnp.tanh(x @ w), tp=2, b=3, d=2, v=4, inputs={"x": "b d tp=I", "w": "d v/tp"},
    )[0]  # fmt: skip
    line = line_of(SumOfRanksAndOwn.backward, "total + g")
    assert note == f"{RIGHT_ONCE}{line} has `total`, not `total + g`"
