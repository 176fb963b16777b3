"""Plain collectives in the autograd graph: torch differentiates none of them."""

import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.wrong_gradients import line_of
from shardproof import scheme, values
from shardproof.experiments.notes import check_notes
from shardproof.verify_one_case import verify_case

IDENTITY, NOTHING = "its backward is the identity", "no gradient passes it"
pytestmark = pytest.mark.filterwarnings("ignore:c10d")  # torch warns of a plain collective in the graph


def declare(function, reference, outputs):
    return scheme(
        reference=reference, mesh={"tp": (2, 4)}, inputs={"x": "b/tp d"}, outputs=outputs,
        draw={"x": values("normal")}, dtypes=("float32",),
    )(function)  # fmt: skip


def times_sum(x):
    return (x * x.sum(0, keepdims=True)).sum(0)


def all_reduced(mesh, x):
    total = x.sum(0)
    dist.all_reduce(total, group=mesh["tp"])
    return (x * total).sum(0)


def gathered(mesh, x):
    own = x.sum(0)
    parts = [torch.empty_like(own) for _ in range(mesh.size("tp"))]
    dist.all_gather(parts, own, group=mesh["tp"])
    return (x * torch.stack(parts).sum(0)).sum(0)


def gathered_beside_its_own(mesh, x):
    own = x.sum(0)
    parts = [torch.empty_like(own) for _ in range(mesh.size("tp"))]
    dist.all_gather(parts, own, group=mesh["tp"])
    parts[mesh.rank("tp")] = own
    return (x * torch.stack(parts).sum(0)).sum(0)


def maximum(mesh, x):
    largest = x.amax(0)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh["tp"])
    return largest


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(
    ("function", "reference", "outputs", "op", "backward"),
    [
        (all_reduced, times_sum, "d tp=P", "all_reduce", IDENTITY),
        (gathered, times_sum, "d tp=P", "all_gather", NOTHING),
        (gathered_beside_its_own, times_sum, "d tp=P", "all_gather", NOTHING),
        (maximum, lambda x: jnp.max(x, 0), "d tp=I", "all_reduce", IDENTITY),
    ],
)
def test_the_first_note_names_the_collective(function, reference, outputs, op, backward):
    declaration = declare(function, reference, outputs)
    report = check_notes(declaration, verify_case(declaration, declaration.case(tp=2, b=6, d=3)))
    site = f"{op} at {line_of(function, f'dist.{op}')}"
    assert report.notes["d/d x"][0].startswith(f"forward equal, gradient not: {site} is not differentiable; {backward}")
    assert "  the collectives of torch_impl.collectives are differentiable" in str(report)
    assert str(report).endswith("if no gradient is wanted, as of an optimizer's step, declare nograd=('x',)")


def gathered_without_gradients(mesh, x):
    own = x.sum(0)
    parts = [torch.empty_like(own) for _ in range(mesh.size("tp"))]
    with torch.no_grad():
        dist.all_gather(parts, own, group=mesh["tp"])
    parts[mesh.rank("tp")] = own
    return (x * torch.stack(parts).sum(0)).sum(0)


def test_a_detached_gather_loses_the_other_ranks_gradients():
    declaration = declare(gathered_without_gradients, times_sum, "d tp=P")
    report = check_notes(declaration, verify_case(declaration, declaration.case(tp=2, b=6, d=3)))
    site = f"all_gather at {line_of(gathered_without_gradients, 'dist.all_gather')}"
    assert report.notes["d/d x"][0] == f"forward equal, gradient not: {site} is not differentiable; {NOTHING}"


class TanhOfHalfTheSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2 / 2)


def shifted_by_a_gathered_maximum(mesh, x):
    largest = x.detach().amax(0)
    parts = [torch.empty_like(largest) for _ in range(mesh.size("tp"))]
    dist.all_gather(parts, largest, group=mesh["tp"])
    shift = torch.stack(parts).amax(0)
    return TanhOfHalfTheSlope.apply(x) * ((x - shift).exp() * shift.exp() / x.exp())


@pytest.mark.usefixtures("without_line_edits")
def test_a_gathered_shift_is_not_to_blame():
    declaration = declare(shifted_by_a_gathered_maximum, lambda x: jnp.tanh(x), "b/tp d")
    report = check_notes(declaration, verify_case(declaration, declaration.case(tp=2, b=6, d=3)))
    assert not any("not differentiable" in note for note in report.notes["d/d x"])


def summed_once(mesh, x):
    total = (x**2).sum(0)
    dist.all_reduce(total, group=mesh["tp"])
    return total


def test_a_plain_sum_is_right_where_each_rank_has_the_gradient():
    declaration = declare(summed_once, lambda x: (x**2).sum(0), "d tp=I")
    assert verify_case(declaration, declaration.case(tp=2, b=6, d=3)).ok


def summed_and_detached(mesh, x):
    total = (x.detach() * x).sum(0)
    dist.all_reduce(total, group=mesh["tp"])
    return total


@pytest.mark.usefixtures("without_line_edits")
def test_a_plain_sum_is_not_blamed_for_another_fault():
    declaration = declare(summed_and_detached, lambda x: (x**2).sum(0), "d tp=I")
    report = check_notes(declaration, verify_case(declaration, declaration.case(tp=2, b=6, d=3)))
    assert not any("not differentiable" in note for note in report.notes["d/d x"])
