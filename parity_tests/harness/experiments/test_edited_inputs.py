"""Wrong functions whose results are the reference's with one input counted twice, reordered or exchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardproof import scheme, values
from shardproof.experiments.edited_inputs import REFERENCE_WITH, name_edited_inputs
from shardproof.experiments.input_edits import Change
from shardproof.experiments.notes import _failing_cases
from shardproof.verify_one_case import verify_case


def first_notes(function, reference, inputs, outputs, case, **more):
    """The first note on each wrong tensor, after this experiment alone."""
    defaults = {
        "mesh": {"tp": (1, 2, 4)},
        "draw": {name: values("normal") for name in inputs},
        "dtypes": ("float32",),
        "nograd": tuple(inputs),
    }
    declaration = scheme(reference=reference, inputs=inputs, outputs=outputs, **{**defaults, **more})(function)
    report = verify_case(declaration, declaration.case(**case))
    assert not report.ok and report.failure is None, str(report)
    named = name_edited_inputs(declaration, report, _failing_cases(declaration, report.case), report.notes)
    return {label: str(of_tensor[0]) for label, of_tensor in named.items()}


def norm_of_all(mesh, w, b):
    squares = torch.zeros((), dtype=w.dtype)
    for gradient in (w, b):
        squares = squares + gradient.square().sum()
    dist.all_reduce(squares, group=mesh["tp"])
    return squares.sqrt()


def norm(w, b):
    return jnp.sqrt((w**2).sum() + (b**2).sum())


def test_squares_of_a_replicated_input_that_every_rank_adds():
    case = {"tp": 2, "o": 4, "i": 2, "h": 3}
    notes = first_notes(norm_of_all, norm, {"w": "o/tp i", "b": "h"}, "tp=I", case)
    assert notes["out"] == (f"every tensor {REFERENCE_WITH} b times sqrt(tp): its squares are counted tp times")


def test_a_dim_of_size_one_is_a_number_without_a_name():
    notes = first_notes(norm_of_all, norm, {"w": "o/tp i", "b": "1 h"}, "tp=I", {"tp": 2, "o": 4, "i": 2, "h": 3})
    assert notes["out"] == (f"every tensor {REFERENCE_WITH} b times sqrt(tp): its squares are counted tp times")


def linear_with_bias_on_every_rank(mesh, x, w, b):
    y = x @ w + b
    dist.all_reduce(y, group=mesh["tp"])
    return y.tanh()


def linear(x, w, b):
    return jnp.tanh(x @ w + b[None])


def test_a_bias_that_every_rank_adds_before_a_sum():
    inputs, case = {"x": "n k/tp", "w": "k/tp o", "b": "o"}, {"tp": 2, "n": 2, "k": 4, "o": 3}
    notes = first_notes(linear_with_bias_on_every_rank, linear, inputs, "n o tp=I", case)
    assert notes["out"] == f"every tensor {REFERENCE_WITH} b times tp: it is counted tp times"


def attention(q, k, v):
    scores = jnp.einsum("shd,thd->hst", q, k)
    return jnp.einsum("hst,thd->shd", jax.nn.softmax(scores, -1), v).reshape(len(q), -1)


def interleaved(x, w):
    q, k, v = jnp.moveaxis((x @ w).reshape(len(x), -1, 3, 2), 2, 0)
    return attention(q, k, v)


def read_as_three_blocks(mesh, x, w):
    q, k, v = (part.reshape(len(x), -1, 2) for part in (x @ w).chunk(3, -1))
    scores = torch.einsum("shd,thd->hst", q, k).softmax(-1)
    return torch.einsum("hst,thd->shd", scores, v).reshape(len(x), -1)


def test_interleaved_heads_that_are_read_as_blocks():
    inputs, case = {"x": "s d", "w": "d k/tp"}, {"tp": 2, "s": 3, "d": 2, "g": 2}
    dims = {"k": "6*g*tp", "o": "2*g*tp", "g": (1, 2, 3)}
    notes = first_notes(read_as_three_blocks, interleaved, inputs, "s o/tp", case, dims=dims)
    order = "w in another order along k: (3, n, 2) is read as (n, 3, 2) within each tp rank's shard"
    assert notes["out"] == f"every tensor {REFERENCE_WITH} {order}"


def gated(x, gate, up):
    return jax.nn.silu(x * gate[None]) * (x * up[None])


def gated_by_the_other(mesh, x, gate, up):
    return torch.nn.functional.silu(x * up) * (x * gate)


@pytest.mark.slow
def test_two_inputs_that_are_exchanged_with_their_gradients():
    inputs, case = {"x": "n d/tp", "gate": "d/tp", "up": "d/tp"}, {"tp": 2, "n": 2, "d": 4}
    notes = first_notes(gated_by_the_other, gated, inputs, "n d/tp", case, nograd=())
    assert set(notes) == {"out", "d/d x", "d/d gate", "d/d up"}
    assert set(notes.values()) == {f"every tensor {REFERENCE_WITH} gate and up exchanged"}


def two_mistakes(mesh, w, b):
    return norm_of_all(mesh, w, b) + w.sum()


def norm_without_the_last(mesh, w, b):
    return norm_of_all(mesh, w, b[:-1])


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("function", [two_mistakes, norm_without_the_last])
def test_no_note_where_no_single_edit_of_an_input_explains_the_result(function):
    case = {"tp": 2, "o": 4, "i": 2, "h": 3}
    notes = first_notes(function, norm, {"w": "o/tp i", "b": "h"}, "tp=I", case)
    assert REFERENCE_WITH not in notes["out"]


@pytest.mark.parametrize(
    "change", [Change(factor=3.0, addend=1.0), Change(1, np.array([2, 0, 1])), Change(1, np.array([0, 0, 0]), 0.5)]
)
def test_the_gradient_of_a_change_is_its_transpose(change):
    rng = np.random.default_rng(0)
    x, dx, c = rng.standard_normal((3, 2, 3))
    x, dx, c = np.round(x), np.round(dx), np.round(c)  # whole numbers are exact
    assert np.vdot(change.of(x + dx) - change.of(x), c) == np.vdot(dx, change.back(c))
