"""The operation that first makes NaN or infinity: named where it is to blame, and only there."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist

from parity_tests.specimens.wrong_gradients import line_of
from shardproof import mask, scheme, values
from shardproof.experiments.first_overflow import FIRST_MADE_BY, Numbers, name_first_overflow
from shardproof.verify_one_case import verify_case


def first_note(function, reference, case, kinds, **more):
    defaults = {"mesh": {"tp": (1, 2)}, "dtypes": ("float32",), "inputs": {"x": "n v/tp"}, "nograd": ("x",)}
    declaration = scheme(reference=reference, **{**defaults, **more})(function)
    drawn = declaration.case(**case)
    report = verify_case(declaration, drawn.replace(values={**drawn.values, **kinds}))
    assert not report.ok and report.failure is None, str(report)
    return str(name_first_overflow(declaration, report, report.notes)["out"][0])


def without_a_shift(mesh, x):
    total = x.exp().sum(-1)
    dist.all_reduce(total, group=mesh["tp"])
    return total.log() * 2.0


def doubled_logsumexp(x):
    return 2.0 * jax.nn.logsumexp(x, -1)


HUGE = {"tp": 2, "n": 2, "v": 4}, {"x": {"kind": "huge"}}


def test_an_exponential_without_a_shift():
    draw = {"x": values("normal", "huge")}
    note = first_note(without_a_shift, doubled_logsumexp, *HUGE, outputs="n tp=I", draw=draw)
    assert f"; {FIRST_MADE_BY}exp at {line_of(without_a_shift, 'exp')}, of numbers up to " in note


def with_an_overflow_that_is_left_out(mesh, x):
    unread = x.exp()
    shift = x.amax(-1, keepdim=True)
    dist.all_reduce(shift, dist.ReduceOp.MAX, group=mesh["tp"])
    total = (x - shift).exp().sum(-1)
    dist.all_reduce(total, group=mesh["tp"])
    return torch.where(unread.sum(-1) < 0.0, 0.0, total.log() + shift[:, 0]) * 1e30 * 1e30


def test_an_overflow_that_is_not_to_blame():
    draw = {"x": values("normal", "huge")}
    note = first_note(with_an_overflow_that_is_left_out, doubled_logsumexp, *HUGE, outputs="n tp=I", draw=draw)
    assert f"; {FIRST_MADE_BY}mul at {line_of(with_an_overflow_that_is_left_out, '1e30')}" in note


def softmax_of_masked_rows(mesh, x, keep):
    return x.masked_fill(~keep, -np.inf).softmax(-1)


def masked_softmax(x, keep):
    shifted = jnp.where(keep, jnp.exp(x - x.max(-1, keepdims=True)), 0.0)
    total = shifted.sum(-1, keepdims=True)
    return shifted / jnp.where(total == 0.0, 1.0, total)


def test_rows_without_a_key():
    note = first_note(
        softmax_of_masked_rows,
        masked_softmax,
        {"tp": 2, "n": 4, "v": 3},
        {"keep": {"keep": "none"}},
        inputs={"x": "n/tp v", "keep": "n/tp v"},
        outputs="n/tp v",
        draw={"x": values("normal"), "keep": mask()},
    )
    assert note.endswith(f"; {FIRST_MADE_BY}softmax at {line_of(softmax_of_masked_rows, 'return')}")


def one_over_squares(mesh, x):
    return 1.0 / (x**2 - x**2)


def test_a_division_by_zero():
    case = {"tp": 2, "n": 2, "v": 4}, {"x": {"kind": "normal"}}
    note = first_note(one_over_squares, lambda x: 2.0 * x, *case, outputs="n v/tp", draw={"x": values("normal")})
    assert note.endswith(f"; {FIRST_MADE_BY}div at {line_of(one_over_squares, '1.0 /')}")


def off_by_one(mesh, x):
    return x + 1.0


def test_no_note_where_every_result_is_finite():
    case = {"tp": 2, "n": 2, "v": 4}, {"x": {"kind": "normal"}}
    note = first_note(off_by_one, lambda x: 1.0 * x, *case, outputs="n v/tp", draw={"x": values("normal")})
    assert FIRST_MADE_BY not in note


def test_nan_of_padding_is_not_the_cause():
    """NaN elsewhere is no excuse for a pointwise operation, but it is one for a sum."""
    x = torch.tensor([np.nan, -np.inf, 1.0])
    numbers = Numbers.of([x, torch.tensor([1.0, 0.0, 1.0])])
    assert numbers.make("mul", torch.tensor([np.nan, np.nan, 1.0]))
    assert not numbers.make("mul", torch.tensor([np.nan, -np.inf, 1.0]))
    assert not numbers.make("sum", torch.tensor(np.nan))
    assert not numbers.make("mul", torch.tensor([np.nan])), "the gradient of a factor that was broadcast is a sum"
