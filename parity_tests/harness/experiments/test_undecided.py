"""A discrete choice that rounding decides is no mismatch, and hides none."""

from xml.etree import ElementTree

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings

from parity_tests.harness.draw.strategy import every_case
from parity_tests.harness.experiments.undecided import CHOICE, TIE, mark_undecided
from parity_tests.harness.report.report import Undecided
from parity_tests.harness.report.summary import Outcome, as_junit, closing
from parity_tests.harness.verdict import judge
from parity_tests.harness.verify import check
from shardproof import scheme, values


def greatest(function=lambda x: x.max(-1).values, kinds=("normal", "ties"), **more):
    """Torch gives the gradient of a maximum to one of several equal numbers, JAX a part to each."""
    return scheme(
        reference=lambda x: x.max(-1), mesh={"tp": (1, 2)}, inputs={"x": "b/tp v"}, outputs="b/tp",
        **{"dims": {"v": (6,)}, "draw": {"x": values(*kinds)}, "dtypes": ("float32",), **more},
    )(lambda mesh, x: function(x))  # fmt: skip


def test_where_numbers_are_equal_a_right_maximum_is_undecided():
    declaration = greatest()
    case = declaration.case(tp=1, b=8, v=6)
    with pytest.raises(Undecided) as caught:
        check(case.replace(values={"x": {"kind": "ties"}}))
    assert TIE in str(caught.value) and "MISMATCH" not in str(caught.value)
    assert check(case.replace(values={"x": {"kind": "normal"}})).ok


@pytest.mark.parametrize("seed", [4, 11])
def test_zeros_that_are_equal_are_a_tie_too(seed):
    """The greatest numbers of these rows are zeros, and so are most."""
    declaration = greatest()
    case = declaration.case(tp=1, b=1, v=6, seed=seed).replace(values={"x": {"kind": "ties"}})
    report = judge(declaration, case)
    assert report.failed and mark_undecided(declaration, report).verdict == "undecided"


def test_some_undecided_examples_are_counted_in_a_pass():
    report = greatest(kinds=("normal", "iota", "peaked", "huge", "tiny", "ties")).verify(seed=0, examples=24)
    assert report.ok and 0 < report.undecided_examples <= 6
    assert f"undecided: {report.undecided_examples} of {report.examples} examples: {TIE}" in str(report)
    assert report.to_dict()["undecided"] == report.undecided_examples


def test_where_most_examples_are_undecided_there_is_no_pass():
    report = greatest(kinds=("ties",)).verify(examples=8, b=8)
    assert not report.ok and report.verdict == "undecided" and "too many for a pass" in str(report)
    assert "1 scheme, 0 mismatches, 1 undecided" in closing(Outcome([report]))
    suite = ElementTree.fromstring(as_junit(Outcome([report])))
    properties = {item.get("name"): item.get("value") for item in suite.iter("property")}
    assert properties["undecided"] == str(report.undecided_examples) and suite.get("failures") == "1"


@pytest.mark.parametrize("factor", [1.5, -1.0])
def test_a_mistake_beside_ties_is_a_mismatch(factor):
    def wrong(x):
        greatest_ones = x.max(-1).values
        return greatest_ones.detach() + factor * (greatest_ones - greatest_ones.detach())

    assert greatest(wrong, kinds=("normal", "ties")).verify(examples=20).verdict == "mismatch"
    assert greatest(wrong, kinds=("ties",)).verify(b=8, examples=20).verdict == "mismatch"


def test_a_mistake_at_zeros_is_no_tie():
    def norm(mesh, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))

    declaration = scheme(
        reference=lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), mesh={"tp": (1,)},
        inputs={"x": "b v tp=I"}, outputs="b v tp=I", draw={"x": values("zeros")}, dtypes=("float32",),
    )(norm)  # fmt: skip
    assert declaration.verify(examples=4).verdict == "mismatch"


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x, y: torch.where(x == 0.0, y + 1.0, y),
        lambda x, y: torch.where((x == x[:, :1]).all(-1, keepdim=True), -y, y),
        lambda x, y: torch.where(x == 0.0, y.detach(), y),
    ],
    ids=["one added where x is 0", "sign of rows of equal numbers", "no gradient where x is 0"],
)
def test_a_mistake_at_equal_numbers_is_a_mismatch_in_each_example(mistake):
    """Equal numbers may move by the rounding of others, and products with them, but not as far as these errors."""
    declaration = scheme(
        reference=lambda x, w: x * w, mesh={"tp": (1,)}, inputs={"x": "b v tp=I", "w": "b v tp=I"},
        outputs="b v tp=I", draw={"x": values("zeros", "ties", "ones")}, dtypes=("float32",),
    )(lambda mesh, x, w: mistake(x, x * w))  # fmt: skip
    failed = 0
    for kind in ("zeros", "ties", "ones"):
        for seed in range(10):
            case = declaration.case(tp=1, b=3, v=6, seed=seed)
            case = case.replace(values={"x": {"kind": kind}, "w": {"kind": "normal"}})
            report = judge(declaration, case)
            failed += report.failed
            assert report.ok or mark_undecided(declaration, report).verdict == "mismatch", str(case)
    assert failed


def mixture(scale=1.0):
    """Each token times the weight of the expert that its logits choose; the logits are stored in bfloat16."""

    def of_ranks(mesh, x, router, weight):
        chosen = (x @ router).argmax(-1)
        return (x.float() * weight.float()[chosen][:, None] * scale).to(x.dtype)

    def reference(x, router, weight):
        return x * weight[(x @ router).argmax(-1)][:, None]

    return scheme(
        reference=reference, mesh={"tp": (1,)}, inputs={"x": "b d tp=I", "router": "d e tp=I", "weight": "e tp=I"},
        outputs="b d tp=I", dims={"b": (64,), "d": (16,), "e": (8,)}, dtypes=("bfloat16",), nograd=("router",),
        draw={name: values("normal") for name in ("x", "router", "weight")}, roundings=2,
    )(of_ranks)  # fmt: skip


def test_a_right_mixture_of_experts_in_bfloat16_is_no_mismatch():
    declaration = mixture()
    verdicts = set()
    for seed in range(30):
        try:
            verdicts.add(check(declaration.case(seed=seed)).verdict)
        except Undecided as undecided:
            assert CHOICE in str(undecided)
            verdicts.add("undecided")
    assert verdicts == {"equal", "undecided"}


def test_a_wrong_mixture_of_experts_is_a_mismatch():
    assert mixture(1.25).verify(examples=10).verdict == "mismatch"


def test_under_hypothesis_an_undecided_example_is_replaced_by_another():
    declaration, judged = greatest(), []

    @settings(max_examples=20, database=None)
    @given(every_case(declaration, tp=1, b=8))
    def test(case):
        judged.append(check(case))

    test()
    assert judged and all(report.ok for report in judged)
