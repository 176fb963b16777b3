"""Errors of the size of roundings: more of them than declared, or sums kept in a coarser dtype."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.specimens.evidence_by_hand import evidence, headline, numbers
from shardproof import scheme, values
from shardproof.explain.clues import explain


def test_a_few_roundings_more():
    want = numbers(9)
    got = want + np.linspace(1e-2, 2e-2, 9)
    budgets = {2: np.full(9, 1e-2), 3: np.full(9, 3e-2), 4: np.full(9, 5e-2)}
    fields = {"budgets_by_roundings": budgets, "coarse_budgets": np.full(9, 5e-2)}
    assert explain(evidence(got, want, **fields))[:2] == (
        "a small error: 3 roundings to bfloat16 could do as much: declare roundings=3 if they are meant",
        "a small error: bfloat16 accumulation could do as much",
    )
    assert headline(got + 1.0, want, **fields).startswith("no pattern")


def test_an_error_far_below_a_narrow_sum_comes_from_a_formula():
    """Beyond 2**-20 of each number, and below the mean of that and the coarser budget, or above it."""
    want, wide = numbers(9), {"coarse_budgets": 2.0**-8 * np.abs(numbers(9))}
    words = "a small error: a formula that cancels, far below bfloat16 accumulation, could do as much"
    assert headline(want * (1 + 2.0**-17), want, **wide) == words
    assert headline(want * (1 + 2.0**-10), want, **wide) == "a small error: bfloat16 accumulation could do as much"
    of_roundings = evidence(want * (1 + 2.0**-17), want, budgets_by_roundings={2: 2.0**-16 * np.abs(want)}, **wide)
    assert explain(of_roundings)[1] == "a small error: bfloat16 accumulation could do as much"


ROUNDED = "rounded to bfloat16: each element is the bfloat16 number next to the reference's"


def of_products(function, reference=lambda x, w: x * w):
    specs = dict(mesh={"tp": (2,)}, inputs={"x": "n/tp d", "w": "n/tp d"}, outputs="n/tp d", dtypes=("float32",))
    declared = scheme(reference=reference, draw={n: values("normal") for n in "xw"}, **specs)(function)
    return declared.verify(tp=2, n=8, d=4)


def test_numbers_of_a_narrower_dtype_were_rounded_to_it():
    report = of_products(lambda mesh, x, w: (x * w).to(torch.bfloat16).float())
    assert report.notes["out"][0] == ROUNDED
    assert not report.notes["d/d w"][0].startswith("rounded")  # the gradient of a rounded product has more bits


def test_a_factor_is_no_rounding():
    """Numbers of few bits tell nothing, and a bfloat16 number may be far from the reference's."""
    halved = of_products(lambda mesh, x, w: (x * w).to(torch.bfloat16).float() / 2)
    ones = of_products(lambda mesh, x, w: x / x + 0 * w, lambda x, w: 1.003 * x / x + 0 * w)
    assert not any(note.startswith("rounded") for report in (halved, ones) for note in report.notes["out"])


def test_one_element_is_reported_as_such():
    clue = headline([2.01], [2.0], coarse_budgets=np.array([0.1]))
    assert clue == "a small error: bfloat16 accumulation could do as much; rests on a single element"


@pytest.mark.slow
def test_a_norm_whose_input_is_cast_twice():
    """At d=1 the two gradients of x cancel but for their roundings to bfloat16."""

    def norm(mesh, x):
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def reference(x):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    declared = dict(reference=reference, mesh={"tp": (2,)}, inputs={"x": "b/tp d"}, outputs="b/tp d")
    more = dict(dims={"d": (1,)}, draw={"x": values("normal")}, dtypes=("bfloat16",))
    report = scheme(**declared, **more)(norm).verify(tp=2, b=4)
    assert report.notes["d/d x"] == ("forward equal, gradient not",)  # no dtype is wider, and 0 is near enough to it
    more["dims"] = {"d": (1, 4)}  # at d=1 alone a budget of two roundings is above the whole gradient
    assert scheme(**declared, **more, roundings=2)(norm).verify(tp=2, b=4).ok


def test_a_result_in_a_narrower_dtype_is_named():
    """This note comes before any pattern: the returned dtype is known, and no pattern explains the error better."""

    @scheme(reference=lambda x: 2 * x, mesh={"tp": (1, 2)}, inputs={"x": "n/tp"}, outputs="n/tp", dtypes=("float32",))
    def doubled_in_half(mesh, x):
        return (2 * x).half()

    report = doubled_in_half.verify(examples=8, seed=0)
    assert "returned in float16, which rounds more than the dtype of the inputs" in str(report)
