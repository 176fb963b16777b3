"""Notes on errors that one number explains: a factor, a sign or a constant, with or without a name."""

import math
from dataclasses import replace

import numpy as np
import pytest

from parity_tests.specimens.evidence_by_hand import AXES, columns_of, evidence, headline, numbers
from shardproof.explain.arithmetic import MEANING_OF_ROOT, MEANING_OF_SIZE
from shardproof.explain.clues import explain
from shardproof.explain.evidence import Evidence

MEANING = "a reduction is missing or repeated, or a mean divides by a local count"


@pytest.mark.parametrize(
    ("factor", "written"),
    [
        (4.0, "4 (= tp)"),
        (2.0, "2 (= cp)"),
        (8.0, "8 (= cp*tp)"),
        (0.25, "0.25 (= 1/tp)"),
        (0.125, "0.125 (= 1/(cp*tp))"),
    ],
)
def test_constant_factor(factor, written):
    want = numbers(3, 4)
    assert headline(factor * want, want) == f"off by the constant factor {written}: {MEANING}"


def test_a_negative_factor_is_an_opposite_sign_too():
    want = numbers(3, 4)
    assert headline(-4.0 * want, want) == f"off by the constant factor -4 (= -tp): the sign is opposite, and {MEANING}"


def test_two_names_for_one_factor_are_both_reported():
    want = numbers(5)
    assert "factor 2 (= cp or dp):" in headline(2 * want, want, axes={"cp": 2, "dp": 2, "tp": 3})


def test_a_factor_through_noise_and_zeros():
    want = numbers(50)
    want[::5] = 0.0
    noise = 1 + 2.0**-9 * np.sign(numbers(50, seed=1))
    assert headline(4 * want * noise, want, relative=2.0**-8) == (
        "off by the constant factor 4 (= tp): a reduction is missing or repeated, or a mean divides by a local count"
    )


def test_a_factor_in_huge_and_tiny_numbers():
    for scale in (1e300, 1e-300):
        want = numbers(6) * scale
        wide = Evidence("x", "output", want / 4, want, np.abs(want) * 2.0**-20, AXES)
        assert explain(wide)[0].startswith("off by the constant factor 0.25 (= 1/tp)")


def test_one_element_is_less_certain():
    assert headline([20.0], [5.0]) == (f"off by the constant factor 4 (= tp): {MEANING}; rests on a single element")
    assert headline(20.0, 5.0).endswith("rests on a single element")
    assert headline([10.0], [5.0], axes={"tp": 4, "m": 8}) == "no pattern; worst at (0)"  # not m/tp
    assert headline([3.65], [5.0]) == "no pattern; worst at (0)"  # for a single element some factor always fits


def test_a_factor_without_a_name():
    want = numbers(6)
    assert headline(0.7 * want, want) == "off by the constant factor 0.7: a scale is missing or wrong"


def test_a_factor_must_fit_everywhere():
    want = numbers(3, 4)
    got = 4 * want
    got[1, 1] = want[1, 1]
    assert not any("factor" in note for note in explain(evidence(got, want)))


def test_a_factor_that_noise_could_give_is_not_reported():
    want = numbers(3) + 3
    blurred = Evidence("x", "output", want * 1.011 + numbers(3, seed=1) * 1e-3, want, np.full(3, 0.03), AXES)
    assert blurred.wrong_count and explain(blurred)[0].startswith("no pattern")
    clear = Evidence("x", "output", want * 1.1 + numbers(3, seed=1) * 1e-3, want, np.full(3, 0.03), AXES)
    assert explain(clear) == ("off by the constant factor 1.1: a scale is missing or wrong",)


def test_a_fit_needs_two_values_larger_than_their_budgets():
    want = np.array([5.0, 1e-13, 2e-13])
    assert headline(0.73 * want, want) == "no pattern; worst at (0)"


def test_gradients_of_a_softmax_of_two_show_no_factor_at_each_index():
    """The two rows are opposite, so that one factor fits both values at each index, whatever is wrong."""
    row, other = numbers(4) + 3, numbers(4, seed=1) + 3
    want, got = np.stack([row, -row * (1 + 1e-9)]), np.stack([other, -other])
    assert not any("at each index" in note for note in explain(evidence(got, want, dims=("e", "d"))))


def test_gradients_of_a_softmax_of_two_show_no_factor():
    want, got = np.array([3.0, -3.0 * (1 + 1e-9)]), np.array([-0.7, 0.7])
    assert headline(got, want) == "no pattern; worst at (0)"


def test_elements_of_smaller_budgets_weigh_more():
    want = np.array([1e6, 1.0, 2.0, 3.0])
    coarse = np.array([0.6, 0.0, 0.0, 0.0])  # within the budget of a million
    assert headline(want + 0.3 + coarse, want) == "off by the added constant 0.3"


def test_opposite_sign():
    want = numbers(6)
    assert headline(-want, want) == "opposite sign"


def test_zero_is_not_a_factor():
    want = numbers(2, 3)
    assert headline(0 * want, want, role="gradient") == "gradient is zero: backward does not reach this input"
    assert headline(0 * want, want) == "output is zero: nothing was written to it"


@pytest.mark.parametrize(
    ("constant", "written"),
    [
        (math.log(4), "log 4 (= log tp)"),
        (-math.log(4), "-log 4 (= -log tp)"),
        (math.log(8), "log 8 (= log(cp*tp))"),
        (0.3, "0.3"),
    ],
)
def test_added_constant(constant, written):
    want = numbers(2, 5)
    assert headline(want + constant, want) == f"off by the added constant {written}"


def test_another_factor_on_each_rank():
    want = numbers(3, 8)
    owners = columns_of((3, 8), 4)
    got = want * np.array([2.0, 1.0, 0.5, 3.0])[owners]
    assert headline(got, want, owners={"tp": owners}) == (
        "off by a constant factor on each tp rank (2, 1, 0.5, 3): a local count or sum is in place of the global one"
    )


def test_another_constant_on_each_rank():
    want = numbers(3, 8)
    owners = columns_of((3, 8), 2)
    got = want + np.array([0.5, -1.25])[owners]
    assert headline(got, want, owners={"cp": owners}) == (
        "off by an added constant on each cp rank (0.5, -1.25): a local statistic is in place of the global one"
    )


def test_another_factor_at_each_index_of_a_dim():
    want = numbers(3, 8)
    got = want * np.array([[0.75], [1.0], [0.375]])
    assert headline(got, want, dims=("b", "s")) == (
        "off by a constant factor at each index of b (0.75, 1, 0.375): "
        "a count, a sum or a weight there is not the reference's"
    )


def test_another_constant_at_each_index_of_a_dim():
    want = numbers(12, 3)
    steps = np.arange(12.0)[:, None] / 4 + 0.3
    assert headline(want + steps, want, dims=("s", "d")) == (
        "off by an added constant at each index of s (0.3, 0.55, 0.8, 1.05, 1.3, 1.55, 1.8, 2.05, ...): "
        "a statistic there is of other elements than the reference's"
    )


def test_a_tensor_of_one_dim_has_no_factor_at_each_index():
    want = numbers(4)
    assert headline(want * np.array([1.0, 2.0, 3.0, 4.0]), want, dims=("b",)).startswith("no pattern")


def test_an_overflow_has_no_factor():
    want = numbers(4) * 1e-20
    got = np.array([1e308, -1e308, 1e308, 1e308])
    assert not headline(got, want).startswith("off by")


def test_a_factor_that_is_the_size_of_a_dim_names_it():
    want = np.array([[1.0, -2.5, 0.5]])
    (note,) = (n for n in explain(evidence(6 * want, want, sizes={"b": 1, "v": 6, "s": 4})) if "factor" in n)
    assert note.startswith("off by the constant factor 6 (= v, the size of a dim)")
    assert "(= 1/s, the size of a dim)" in explain(evidence(want / 4, want, axes={"tp": 2}, sizes={"s": 4}))[0]
    assert "size of a dim" not in explain(evidence(5 * want, want, sizes={"v": 6}))[0]


def test_a_factor_that_is_the_size_of_several_dims_names_them():
    want, sizes = np.array([[1.0, -2.5, 0.5]]), {"b": 4, "s": 6, "d": 3}
    assert headline(24 * want, want, sizes=sizes, axes={}) == (
        f"off by the constant factor 24 (= b*s, the size of dims): {MEANING_OF_SIZE}"
    )
    assert "(= 1/(b*s*d), the size of dims)" in headline(want / 72, want, sizes=sizes, axes={})
    assert "(= b or s*d, the size of dims)" in headline(12 * want, want, sizes={"b": 12, "s": 4, "d": 3}, axes={})


def test_a_factor_that_is_a_root_of_the_ranks_names_the_axis():
    want = np.random.default_rng(2).normal(size=(4, 6))
    for got, name in ((want / 2**0.5, "1/sqrt(tp)"), (want * 2**0.5, "sqrt(tp)")):
        note = explain(evidence(got, want, axes={"tp": 2, "cp": 1}))[0]
        assert f" (= {name}): {MEANING_OF_ROOT}" in note
    assert "sqrt" not in explain(evidence(1.4 * want, want, axes={"tp": 2}))[0]


def test_a_number_of_ranks_may_be_the_root_of_another():
    want = np.random.default_rng(2).normal(size=(4, 6))
    (of_two,) = explain(evidence(want / 2**0.5, want, axes={"tp": 2, "dp": 1}))[:1]
    of_four = explain(evidence(want / 4**0.5, want, axes={"tp": 4, "dp": 2}))
    assert of_four[0].startswith(f"off by the constant factor 0.5 (= 1/dp): {MEANING}")
    assert of_two.supported_by(of_four) == of_two and of_four[0].supported_by([of_two]) is None


def test_a_root_with_an_epsilon_is_recognised():
    """An epsilon under the root changes each number a little differently, far more than rounding does."""
    rng = np.random.default_rng(2)
    want, square = rng.normal(size=(4, 6)), rng.uniform(1.0, 1.2, size=(4, 1))
    got = want * np.sqrt((square + 1e-4) / (2 * square + 1e-4))
    of_root = replace(evidence(got, want, axes={"tp": 2}), budgets=np.full(want.shape, 4e-6))
    assert not of_root.fits(want / 2**0.5)
    assert f" (= 1/sqrt(tp)): {MEANING_OF_ROOT}" in explain(of_root)[0]


def test_the_share_of_a_mask_that_counts():
    want = numbers(3, 4)
    shares = {"keep": 0.3, "labels": 0.6}
    (note, *_) = explain(Evidence("x", "output", 0.3 * want, want, np.abs(want) * 2.0**-20, AXES, shares=shares))
    assert note == (
        "off by the constant factor 0.3 (= the share of keep that counts): a mean divides by all elements, "
        "by ignored ones too"
    )


def test_the_number_of_a_mask_that_counts():
    want = numbers(3, 4)
    for got, name in ((7 * want, "the number of keep that count"), (want / 7, "1/the number of keep that count")):
        note = headline(got, want, shares={"keep": 0.7}, counts={"keep": 7, "labels": 5})
        assert note == f"off by the constant factor {got.flat[0] / want.flat[0]:.4g} (= {name}): {MEANING_OF_SIZE}"
