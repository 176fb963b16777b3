"""Notes that one failing case suggests and another case, or a repaired collective, refutes."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn

from parity_tests.specimens.noted_scheme import declared, notes, notes_on_case
from parity_tests.specimens.wrong_gradients import (
    GatherWithoutSum,
    line_of,
    summed,
    two_products_scheme,
)
from shardproof import ids, mask, token_below, values, verify_one_case
from shardproof.experiments.notes import check_notes
from shardproof.experiments.own_shards import OWN
from torch_impl.collectives import all_reduce


def test_opposite_errors_in_two_elements_are_not_an_offset():
    def sharper(mesh, x):
        return torch.softmax(1.5 * x, -1)

    declaration = declared(sharper, lambda x: jax.nn.softmax(x, -1), "b v tp=I", "b v tp=I", dims={"v": (2,)})
    assert not any("off along v" in note for note in notes(declaration.verify(b=8)))


def test_a_learning_rate_error_is_not_rounding():
    """In float32 alone: small beside the weights, and 100 times the budget."""

    def averaged_twice(mesh, w, g):
        buffer = torch.empty(w.shape, dtype=torch.float32)  # a run in float64 raises
        dist.all_reduce(buffer.copy_(g) if g.dtype == torch.float32 else g.bad, group=mesh["dp"])
        return w - 1e-4 * buffer / mesh.size("dp")

    declaration = declared(
        averaged_twice, lambda w, g: w - 1e-4 * g, {"w": "n dp=I", "g": "n dp=P"}, "n dp=I", mesh={"dp": (2,)},
        nograd=("w", "g"), draw={"w": values("normal"), "g": values("normal")},
    )  # fmt: skip
    assert not any("rounding" in note or "accumulation" in note for note in notes(declaration.verify()))


def smoothed(eps_of_others, where):
    """Minus the log-probability of the target, `eps_of_others` of its weight spread over all."""

    def loss(x, target):
        wide = where.float(x)
        logprob = where.log_softmax(wide)
        return -(1 - eps_of_others) * where.at(logprob, target) - eps_of_others * logprob.mean(-1)

    return loss


class Torch:
    float = staticmethod(lambda x: x.float() if x.dtype != torch.float64 else x)
    log_softmax = staticmethod(lambda x: torch.log_softmax(x, -1))
    at = staticmethod(lambda x, target: x.gather(-1, target[..., None])[..., 0])


class Jax:
    float = staticmethod(lambda x: x)
    log_softmax = staticmethod(lambda x: jax.nn.log_softmax(x, -1))
    at = staticmethod(lambda x, target: jnp.take_along_axis(x, target[..., None], -1)[..., 0])


@pytest.mark.slow
def test_an_error_that_stays_in_a_wider_dtype_is_no_rounding():
    loss = smoothed(0.1 * 9 / 8, Torch)
    declaration = declared(
        lambda mesh, x, target: loss(x, target), smoothed(0.1, Jax), {"x": "b v tp=I", "target": "b"}, "b tp=I",
        draw={"x": values("normal"), "target": token_below("v")}, dtypes=("bfloat16",),
    )  # fmt: skip
    assert not any("within what" in note for note in notes(declaration.verify(examples=60)))


def test_a_collective_that_was_waited_for_was_not_read_before_its_wait():
    def undefined(mesh, x):
        total = x.detach().clone()
        dist.all_reduce(total, group=mesh["tp"], async_op=True).wait()
        return torch.log(x - 100.0) + 0.0 * total

    declaration = declared(undefined, lambda x: jnp.log(100.0 - x), "b tp=I", "b tp=I")
    assert not any("before its wait" in note for note in notes(declaration.verify(b=4)))


def third_of_the_gradient(x):
    return (3 * x).detach() + (x - x.detach())


@pytest.mark.usefixtures("without_line_edits")
def test_no_collective_is_to_blame_where_one_rank_is_enough():
    declaration = declared(lambda mesh, x: third_of_the_gradient(x), lambda x: 3.0 * x, "b/tp", "b/tp",
                           mesh={"tp": (1, 2)})  # fmt: skip
    for tp in (1, 2):
        assert "forward equal, gradient not" in notes(declaration.verify(tp=tp, b=4))


def test_a_detached_tensor_blames_no_collective():
    declaration = declared(lambda mesh, x: x.detach() * 3 + 0 * x, lambda x: 3.0 * x, "b/tp", "b/tp")
    assert not any("collective" in note for note in notes(declaration.verify(b=4)))


def sum_of_torch(mesh, x):
    return dist_nn.all_reduce(x, group=mesh["tp"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_backward_of_torchs_own_collective_is_at_the_line_that_called_it():
    declaration = declared(sum_of_torch, lambda x: x, "b tp=P", "b tp=I")
    report = declaration.verify(b=4)
    backward = [row for row in report.ledger.rows if row.phase == "bwd"]
    assert backward and {row.source for row in backward} == {line_of(sum_of_torch, "all_reduce")}
    assert not any("?" in note for note in notes(report))


def test_a_negative_factor_is_no_count():
    def wrong(mesh, x):
        return x * (2.0 if mesh.rank("tp") == 0 else -426.5)

    declaration = declared(wrong, lambda x: 1.0 * x, "b/tp", "b/tp")
    assert not any("count" in note for note in notes(declaration.verify(b=8)))


def reduced_by(op, factor=1.0):
    def total(mesh, x):
        local = factor * x.sum(0)
        dist.all_reduce(local, op, group=mesh["tp"])
        return local

    return total


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("op", "reference", "words"),
    [
        (dist.ReduceOp.AVG, lambda x: x.sum(0), "SUM, not AVG"),
        (dist.ReduceOp.SUM, lambda x, mesh: x.sum(0) / mesh["tp"], "AVG, not SUM"),
    ],
)
def test_a_mean_for_a_sum_is_named_by_its_line(op, reference, words):
    wrong = reduced_by(op)
    declaration = declared(wrong, reference, "b/tp d", "d tp=I", nograd=("x",), mesh={"tp": (1, 2, 4)})
    note = f"right once all_reduce at {line_of(reduced_by, 'dist.all_reduce')} takes {words}"
    assert note in notes(declaration.verify())


def test_a_claim_is_tried_on_the_values_that_are_declared():
    """A mean over a mask of ones is off by the ranks; of a mask of normal values, which is none, by no constant."""

    def locally_normalised(mesh, x, mask):
        return summed((x * mask).sum(1) / mask.sum(1), mesh["tp"])

    declaration = declared(
        locally_normalised, lambda x, mask: (x * mask).sum(1) / mask.sum(1),
        {"x": "b s/tp", "mask": "b s/tp"}, "b tp=I",
        draw={"x": values("normal"), "mask": values("ones")}, nograd=("mask",), mesh={"tp": (2, 4)},
    )  # fmt: skip
    report = declaration.verify()
    (of_output, *_), (of_gradient, *_) = report.notes["out"], report.notes["d/d x"]
    for note in (of_output, of_gradient):
        assert "off by the constant factor" in note and "(= tp)" in note, note
    assert report.values_to_avoid == ()  # that a mask of other values would hide it is no advice


@pytest.mark.slow
def test_a_mean_of_local_means_keeps_a_factor_on_each_rank():
    """Cases of a rank without a kept element, and of one factor for all ranks, do not refute it."""

    def mean_of_means(mesh, x, keep):
        local = (x**2 * keep).sum() / keep.sum().clamp(min=1)
        return summed(local, mesh["cp"]) / mesh.size("cp")

    declaration = declared(
        mean_of_means,
        lambda x, keep: (x**2 * keep.astype(x.dtype)).sum() / jnp.maximum(keep.sum(), 1).astype(x.dtype),
        {"x": "b s/cp", "keep": "b s/cp"}, "cp=I",
        draw={"x": values("normal", "ties"), "keep": mask("s")}, mesh={"cp": (1, 2, 4)},
    )  # fmt: skip
    for report in (declaration.verify(), declaration.verify(cp=2, b=3, s=16)):
        assert any("constant factor" in note for note in report.notes["d/d x"]), report
    note = (
        "off by a constant factor on each cp rank (1.025, 0.9762): a local count or sum is in place of the global one"
    )
    assert any(n.startswith(note) for n in declaration.verify(cp=2).notes["d/d x"])


@pytest.mark.usefixtures("without_line_edits")  # one divides by the factor, which is right
def test_a_sum_is_not_blamed_for_a_factor_that_is_the_ranks_by_chance():
    doubled = reduced_by(dist.ReduceOp.SUM, factor=2.0)
    declaration = declared(
        doubled, lambda x: x.sum(0), "b/tp d", "d tp=I", nograd=("x",), mesh={"tp": (2, 4)}
    )  # on two ranks a mean is right
    assert not any("right once" in note for note in notes(declaration.verify()))


@pytest.mark.slow
def test_a_sum_is_not_blamed_for_a_count_that_all_ranks_have_alike_where_nothing_is_masked():
    def mean_by_a_local_count(mesh, x, keep):
        return summed((x * keep).sum(), mesh["cp"]) / keep.sum().clamp(min=1)

    declaration = declared(
        mean_by_a_local_count,
        lambda x, keep: (x * keep.astype(x.dtype)).sum() / jnp.maximum(keep.sum(), 1).astype(x.dtype),
        {"x": "s/cp:dual_chunk_swap", "keep": "s/cp:dual_chunk_swap"}, "cp=I",
        draw={"x": values("normal", "ties"), "keep": mask("s")}, mesh={"cp": (1, 2, 4)},
    )  # fmt: skip
    assert not any("right once all_reduce" in note for note in notes(declaration.verify()))


def test_a_sum_is_not_blamed_for_another_axis():
    """A mean would be right on cp=2 tp=1, and wrong on cp=2 tp=2, where the sum is right."""

    def divided_by_the_other_axis(mesh, x):
        return summed(x.sum(), mesh["cp"]) / mesh.size("tp")

    declaration = declared(
        divided_by_the_other_axis, lambda x, mesh: x.sum() / mesh["cp"], {"x": "s/cp tp=R"}, "cp=I tp=I",
        nograd=("x",), mesh={"cp": (1, 2), "tp": (1, 2)},
    )  # fmt: skip
    report = declaration.verify(cp=2, tp=1)
    assert not report.ok and not any("right once" in note for note in notes(report))


def test_being_first_in_the_backward_blames_no_collective():
    report = two_products_scheme().verify(tp=2, b=4, d=3)
    of_backward = [row for row in report.ledger.of(0) if row.phase == "bwd"]
    assert [row.seq for row in of_backward] == [2, 3]  # g's row, which is right, and w's
    line = line_of(summed, "dist.all_reduce")
    assert f"forward equal, gradient not: all_reduce #3 at {line} [bwd] is one too many" in report.notes["d/d w"]


class SumOverTheWorld(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


@pytest.mark.slow
def test_a_sum_that_another_mesh_needs_is_not_one_too_many():
    """A group that is too large: where tp has one rank, to leave the sum out is right, and nowhere else."""
    declaration = declared(
        lambda mesh, x, w: SumOverTheWorld.apply(x) @ w.T, lambda x, w: x @ w.T,
        {"x": "b/dp i tp=I", "w": "o/tp i dp=R"}, "b/dp o/tp", mesh={"dp": (1, 2), "tp": (1, 2)},
        draw={"x": values("normal"), "w": values("normal")},
    )  # fmt: skip
    assert not any("one too many" in note for note in notes(declaration.verify()))


@pytest.mark.slow
def test_one_zero_element_is_not_an_all_zero_tensor():
    """The offset of a shard by its own width: the smallest case is of one row, the larger uneven ones are not zero."""

    def embedded(mesh, ids, table):
        start = mesh.rank("tp") * len(table)
        is_here = (ids >= start) & (ids < start + len(table))
        rows = torch.cat([table, 0 * table.sum(0, keepdim=True)])[(ids - start).clamp(0, len(table))]
        return all_reduce(torch.where(is_here[..., None], rows, 0.0), mesh["tp"], out="R")

    declaration = declared(
        embedded, lambda ids, table: table[ids], {"ids": "b s", "table": "v/tp:ragged d"}, "b s d tp=R",
        draw={"ids": token_below("v"), "table": values("normal")}, reduction=("b", "s"),
    )  # fmt: skip
    assert not any(note.startswith(("output is zero", "gradient is zero")) for note in notes(declaration.verify()))


@pytest.mark.slow
def test_a_rank_with_only_ignored_labels_lacks_no_addend():
    """The mean of the ranks' means: where a rank has no label to count, its mean is zero in the right function too."""

    def mean_of_means(mesh, logits, labels):
        of_rank = torch.nn.functional.cross_entropy(logits, labels.long(), ignore_index=-100, reduction="sum")
        return of_rank / (labels != -100).sum().clamp(min=1) / mesh.size("dp")

    def reference(logits, labels):
        counts = labels != -100
        of_tokens = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.where(counts, labels, 0)[:, None], 1)[:, 0]
        return -jnp.where(counts, of_tokens, 0).sum() / jnp.maximum(counts.sum(), 1).astype(logits.dtype)

    declaration = declared(
        mean_of_means, reference, {"logits": "t/dp v", "labels": "t/dp"}, "dp=P", mesh={"dp": (1, 2, 4)},
        draw={"logits": values("normal"), "labels": ids("v", ignore=-100)}, reduction=("t", "v"),
    )  # fmt: skip
    assert not any("gave only zeros" in note for note in notes(declaration.verify()))


def test_a_backward_that_lacks_a_sum_is_named_by_the_collective_of_its_forward():
    def weighted(mesh, x, w):
        everybody = GatherWithoutSum.apply(x, mesh["tp"])
        return everybody[None] * w[:, None]

    normal = {"x": values("normal"), "w": values("normal")}
    declaration = declared(
        weighted, lambda x, w: x[None] * w[:, None], {"x": "b/tp", "w": "c/tp"}, "c/tp b", draw=normal
    )
    line = line_of(GatherWithoutSum, "dist.all_gather(")
    expected = f"forward equal, gradient not: the backward of all_gather at {line} lacks a sum of the ranks' gradients"
    assert expected in notes(declaration.verify())


def test_a_buffer_that_was_read_too_early_is_named():
    def early(mesh, x):
        first = x.detach().clone()
        dist.all_reduce(first, group=mesh["tp"], async_op=True).wait()
        total = x.detach().clone()
        work = dist.all_reduce(total, group=mesh["tp"], async_op=True)
        out = x + 0.0 * total + 0.0 * first
        work.wait()
        return out

    declaration = declared(early, lambda x: 1.0 * x, "b tp=R", "b tp=I")
    line, report = line_of(early, "work = "), declaration.verify(tp=1)
    assert any(note.endswith(f"; read before its wait: all_reduce at {line}") for note in notes(report))
    assert "one rank is enough" not in str(report)


def test_a_nan_that_infinities_make_is_no_buffer_read_too_early():
    def above_the_greatest(mesh, x):
        top = x.amax(-1, keepdim=True)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=mesh["tp"], async_op=True).wait()
        return x - top

    def reference(x):
        top = x.max(-1, keepdims=True)
        return jnp.where(jnp.isfinite(top), x - jnp.where(jnp.isfinite(top), top, 0.0), 0.0)

    draw = {"x": values("neg_inf_mask", full_rows=True)}
    declaration = declared(above_the_greatest, reference, "b v/tp", "b v/tp", nograd=("x",), draw=draw)
    (note,) = notes(declaration.verify(b=1, v=2, tp=2, examples=40))
    assert note.startswith("not finite first at") and "wait" not in note


def test_a_stage_without_a_loss_does_not_lack_an_addend():
    """The last rank alone has the loss, in cases that pass too; where no case passes, the note says no more."""

    def loss_of_the_last(wrong_from):
        def loss(mesh, x):
            is_last = mesh.rank("tp") == mesh.size("tp") - 1
            factor = 2.0 if x.shape[0] >= wrong_from else 1.0
            return x.sum() * (factor if is_last else 0.0)

        return declared(loss, lambda x: x.sum(), "b tp=I", "tp=P", nograd=("x",))

    assert not any("only zeros" in note for note in notes(loss_of_the_last(wrong_from=5).verify(b=6)))
    of_all = [note for note in notes(loss_of_the_last(wrong_from=0).verify(b=6)) if "only zeros" in note]
    assert of_all == ["tp rank 0 gave only zeros to the sum, which is right only if this rank has no share in the sum"]


def test_a_rank_that_gives_its_addend_in_cases_that_pass_gives_it_not_here():
    def forgotten(mesh, x):
        return x.sum() * (0.0 if mesh.rank("tp") == 1 and x.shape[0] >= 5 else 1.0)

    declaration = declared(
        forgotten, lambda x: x.sum(), "b/tp:contiguous", "tp=P", nograd=("x",), dims={"b": (2, 4, 12)}
    )
    assert "tp rank 1 gave only zeros to the sum, unlike in cases that pass" in notes(declaration.verify(b=12))


@pytest.mark.slow
def test_an_element_that_one_dtype_misses_is_no_rounding():
    """In a wider dtype the error vanishes, but it stays where the inputs move a little: a branch for one dtype."""

    def forgetful(mesh, x):
        wide = x.double()
        total = (wide.softmax(-1) if x.dtype == torch.float32 else wide.softmax(-1) * keeps_all_but_one(wide)).to(
            x.dtype
        )
        return total

    def keeps_all_but_one(x):
        return torch.where(torch.arange(x.shape[-1]) == 3, 0.97, 1.0)

    declaration = declared(
        forgetful, lambda x: jax.nn.softmax(x, -1), "b v tp=I", "b v tp=I", dtypes=("bfloat16",), dims={"v": (64,)}
    )
    assert not any("within what" in note for note in notes(declaration.verify(b=4)))


@pytest.mark.parametrize("seed", range(3))
def test_an_order_among_large_numbers_is_no_rounding(seed):
    """Two rows that change places differ by less than bfloat16 may lose beside a row that is far larger."""

    def swapped(mesh, x):
        return (x - x.mean(0, keepdim=True))[[1, 0, *range(2, len(x))]]

    declaration = declared(
        swapped, lambda x: x - x.mean(0, keepdims=True), "t tp=I", "t tp=I",
        draw={"x": values("large", "normal")}, mesh={"tp": (1,)}, dims={"t": (12,)},
    )  # fmt: skip
    case = declaration.case(t=12, seed=seed).replace(values={"x": {"kind": "large"}})
    report = verify_one_case.verify_case(declaration, case)
    assert not any("accumulation may do" in note for note in notes(check_notes(declaration, report)))


@pytest.mark.slow
def test_errors_are_compared_within_one_copy():
    """Each of two ranks keeps the mean of its own half: one adds as much as the other subtracts."""

    def running_mean(mesh, x, running):
        running.mul_(0.9).add_(0.1 * x.mean((0, 2)))
        return x * 2

    def reference(x, running):
        return x * 2, 0.9 * running + 0.1 * x.mean((0, 2))

    declaration = declared(
        running_mean, reference, {"x": "n c w/tp", "running": "c tp=I"}, "n c w/tp", mesh={"tp": (1, 2)},
        modifies=("running",), nograd=("running",), reduction=("n", "w"),
        draw={"x": values("normal", "ties"), "running": values("normal", "ties")},
    )  # fmt: skip
    for seed in range(3):
        of_all = notes(declaration.verify(seed=seed))
        assert of_all[0].startswith("right once mean at "), of_all
        assert of_all[1:3] == [OWN, "tp ranks hold different copies of what should be one value"], of_all


def test_copies_that_add_up_in_one_case_alone_are_different_copies():
    """Each rank clips its own addend. A norm below 1 is not clipped, so that two such addends add up."""

    def clipped(mesh, x):
        return x / x.norm().clamp(min=1)

    def reference(x):
        return x / jnp.maximum(jnp.linalg.norm(x), 1)

    found = notes_on_case(
        clipped, reference, {"x": "n dp=P"}, "n dp=I", {"dp": 2, "n": 1, "seed": 0, "dtype": "float32"},
        mesh={"dp": (1, 2)}, nograd=("x",),
    )  # fmt: skip
    assert found["out"][1:] == ["dp ranks hold different copies of what should be one value"]
