"""A choice that rounding decides is reported as undecided, and a mismatch beside it is still reported."""

from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from jaxtyping import Bool, Float, Int

from shardproof import scheme, values
from shardproof.draw.strategy import every_case
from shardproof.engines.program import Program
from shardproof.experiments import undecided
from shardproof.experiments.undecided import CHOICE, NO_FINITE_GRADIENT, TIE, mark_undecided, verify_or_undecided
from shardproof.report.report import Undecided
from shardproof.report.summary import Outcome, as_junit, closing
from shardproof.verification import check
from shardproof.verify_one_case import verify_case


def greatest(function=lambda x: x.max(-1).values, kinds=("normal", "ties"), **more):
    """At ties torch gives the whole gradient of a maximum to one element; JAX divides it among them."""
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
    """The maxima of these rows are zeros, and most elements are zeros."""
    declaration = greatest()
    case = declaration.case(tp=1, b=1, v=6, seed=seed).replace(values={"x": {"kind": "ties"}})
    report = verify_case(declaration, case)
    assert report.failed and mark_undecided(declaration, report).verdict == "undecided"


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "zeros"},
        {"kind": "normal", "border": ["zeros", 0, "all"]},
        {"kind": "neg_inf_mask"},
        {"kind": "ties", "border": ["neg_inf_mask", 0, "all"]},
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_equal_numbers_are_a_tie_wherever_they_were_drawn(value, seed):
    """Rows of zeros and rows that are masked throughout have several maxima."""
    declaration = greatest(draw={"x": values("normal", "zeros", "ties", "neg_inf_mask", full_rows=True)})
    case = declaration.case(tp=2, b=4, v=6, seed=seed).replace(values={"x": value})
    assert verify_or_undecided(declaration, case).undecided_reason in (None, TIE)


def scheme_on_one_rank(function, reference, *kinds, full_rows=False, **more):
    return scheme(
        reference=reference, mesh={"tp": (1,)}, inputs={"x": "b v tp=I"}, outputs="b v tp=I", dtypes=("float32",),
        draw={"x": values(*kinds, full_rows=full_rows)}, **more,
    )(lambda mesh, x: function(x))  # fmt: skip


def test_a_single_zero_is_a_tie_with_the_zero_of_a_relu():
    """At 0 the derivative of a maximum with 0 is one half in JAX, and 0 in torch."""
    relu = scheme_on_one_rank(lambda x: torch.relu(x), lambda x: jnp.maximum(x, 0.0), "normal", "zeros")
    zero = relu.case(b=1, v=1).replace(values={"x": {"kind": "zeros"}})
    assert verify_or_undecided(relu, zero).undecided_reason == CHOICE
    size = scheme_on_one_rank(absolute(3.0), jax_absolute, "normal", "zeros")
    assert verify_or_undecided(size, zero.replace(scheme=size.key)).verdict == "mismatch"


class WithGradient(torch.autograd.Function):
    """A given value, with a given derivative with respect to x."""

    @staticmethod
    def forward(ctx, x, value, derivative):
        ctx.derivative = derivative
        return value.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return ctx.derivative * cotangent, None, None


def absolute(at_zero):
    return lambda x: WithGradient.apply(x, x.detach().abs(), torch.where(x == 0, at_zero, x.detach().sign()))


def jax_absolute(x):
    return jnp.abs(x)


def test_without_a_finite_gradient_of_the_reference_the_case_is_undecided():
    """Torch has NaN at 0, JAX an infinity. The sentence says how to leave out extreme values that were drawn."""
    root = scheme_on_one_rank(lambda x: x.abs().sqrt(), lambda x: jnp.sqrt(jnp.abs(x)), "normal", "zeros")
    case = root.case(b=2, v=3).replace(values={"x": {"kind": "zeros"}})
    assert verify_or_undecided(root, case).undecided_reason == NO_FINITE_GRADIENT
    assert verify_or_undecided(root, case.replace(values={"x": {"kind": "normal"}})).ok
    extreme = case.replace(values={"x": {"kind": "zeros", "border": ["neg_inf_mask", 0, "all"]}})
    reason = verify_or_undecided(root, extreme).undecided_reason
    assert reason.startswith(f"{NO_FINITE_GRADIENT}; drawn for it: x neg_inf_mask at the border of a shard; if such")


@pytest.mark.parametrize("gradient", [1e30, float("nan"), float("inf")])
def test_a_gradient_at_zeros_outside_the_range_is_a_mismatch(gradient):
    """At 0 the gradient of |x| is any number from -1 to 1; near 0 sqrt |x| has large gradients of both signs."""
    size = scheme_on_one_rank(absolute(gradient), jax_absolute, "zeros")
    assert verify_or_undecided(size, size.case(b=2, v=3)).verdict == "mismatch"
    root = scheme_on_one_rank(
        lambda x: WithGradient.apply(x, x.detach().abs().sqrt(), gradient), lambda x: jnp.sqrt(jnp.abs(x)), "zeros"
    )
    expected = "mismatch" if gradient == 1e30 else "undecided" if gradient != gradient else "equal"
    assert verify_or_undecided(root, root.case(b=2, v=3)).verdict == expected


def test_infinities_excuse_no_output_and_no_gradient_that_is_nan():
    """In masked rows the gradient of the reference is 0, whichever finite number replaces the infinities."""
    kinds = ("normal", "neg_inf_mask")
    reference = lambda x: jnp.exp(x)  # noqa: E731
    wrong = (
        lambda x: torch.exp(x) + (x.isinf() & (x.isinf().sum() > 1)),
        lambda x: WithGradient.apply(x, x.exp(), torch.where(x.isinf(), float("nan"), x.exp())),
        lambda x: WithGradient.apply(x, x.exp(), torch.where(x.isinf(), 1.0, x.exp())),
    )
    for function in (torch.exp, *wrong):
        declaration = scheme_on_one_rank(function, reference, *kinds, full_rows=True)
        case = declaration.case(b=3, v=4, seed=1).replace(values={"x": {"kind": "neg_inf_mask"}})
        assert verify_or_undecided(declaration, case).verdict == ("equal" if function is torch.exp else "mismatch")


def centred(x, xp):
    return x - x.mean(-1, keepdims=True) if xp is jnp else x - x.mean(-1, keepdim=True)


def test_the_gradient_of_a_nan_output_is_not_judged():
    """At NaN, torch's relu passes the cotangent and JAX's does not. The other rows are judged."""
    declaration = scheme_on_one_rank(
        lambda x: torch.relu(centred(x, torch)), lambda x: jax.nn.relu(centred(x, jnp)), "normal", "neg_inf_mask"
    )
    wrong = scheme_on_one_rank(
        lambda x: torch.relu(centred(WithGradient.apply(x, x, 1.5), torch)),
        lambda x: jax.nn.relu(centred(x, jnp)), "normal", "neg_inf_mask",
    )  # fmt: skip
    for seed in range(4):
        case = declaration.case(b=6, v=2, seed=seed).replace(values={"x": {"kind": "neg_inf_mask"}})
        assert verify_or_undecided(declaration, case).verdict == "equal"
        report = verify_or_undecided(wrong, case)
        assert report.verdict == "mismatch"
        assert not np.isnan(report.tensors[0].want[report.tensors[1].where])


@pytest.mark.parametrize("right", [lambda x: x > 0.0, lambda x: x < 0.0], ids=["right", "wrong"])
def test_a_wrong_boolean_is_a_mismatch(right):
    """Booleans have a range like numbers: from False to True."""
    positive = scheme(
        reference=lambda x: x > 0.0,
        mesh={"tp": (1, 2)},
        inputs={"x": "b/tp"},
        outputs="b/tp",
        nograd=("x",),
        draw={"x": values("normal")},
        dtypes=("float32",),
    )

    def signs(mesh: object, x: Float[torch.Tensor, "b"]) -> Bool[torch.Tensor, "b"]:
        return right(x)

    report = positive(signs).verify(examples=8)
    assert report.verdict == ("equal" if right(1.0) else "mismatch")


@pytest.mark.slow
def test_a_hint_names_the_values_that_would_avoid_the_point():
    report = greatest(kinds=("ties",)).verify(examples=8, b=8)
    hint = "equal with normal values, drawn for it: x ties; if they never occur, declare draw={'x': values('normal')}"
    assert report.verdict == "undecided" and f"  {hint}" in str(report).splitlines()
    at_zeros = scheme_on_one_rank(absolute(3.0), jax_absolute, "normal", "zeros")
    report = at_zeros.verify(examples=40)
    assert report.verdict == "mismatch" and report.values_to_avoid == ("x",), str(report)
    assert "values('normal')}" in str(report)
    everywhere = scheme_on_one_rank(lambda x: x.abs() * 2, jax_absolute, "zeros", "ones").verify(examples=4)
    assert everywhere.verdict == "mismatch" and "values('normal')" not in str(everywhere)


def test_some_undecided_examples_are_counted_in_a_pass():
    report = greatest(kinds=("normal", "iota", "peaked", "huge", "tiny", "ties")).verify(seed=3, examples=24)
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


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("factor", [1.5, -1.0])
def test_a_mistake_beside_ties_is_a_mismatch(factor):
    def wrong(x):
        greatest_ones = x.max(-1).values
        return greatest_ones.detach() + factor * (greatest_ones - greatest_ones.detach())

    assert greatest(wrong, kinds=("normal", "ties")).verify(examples=20).verdict == "mismatch"
    assert greatest(wrong, kinds=("ties",)).verify(b=8, examples=20).verdict == "mismatch"


@pytest.mark.usefixtures("unexplained")
def test_a_mistake_at_zeros_is_no_tie():
    def norm(mesh, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))

    declaration = scheme(
        reference=lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), mesh={"tp": (1,)},
        inputs={"x": "b v tp=I"}, outputs="b v tp=I", draw={"x": values("zeros")}, dtypes=("float32",),
    )(norm)  # fmt: skip
    assert declaration.verify(examples=4).verdict == "mismatch"


@pytest.mark.fast_values(1)
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
    """Equal numbers, and products with them, may move by the rounding of other numbers, but less than these errors."""
    declaration = scheme(
        reference=lambda x, w: x * w, mesh={"tp": (1,)}, inputs={"x": "b v tp=I", "w": "b v tp=I"},
        outputs="b v tp=I", draw={"x": values("zeros", "ties", "ones")}, dtypes=("float32",),
    )(lambda mesh, x, w: mistake(x, x * w))  # fmt: skip
    failed = 0
    for kind in ("zeros", "ties", "ones"):
        for seed in range(10):
            case = declaration.case(tp=1, b=3, v=6, seed=seed)
            case = case.replace(values={"x": {"kind": kind}, "w": {"kind": "normal"}})
            report = verify_case(declaration, case)
            failed += report.failed
            assert report.ok or mark_undecided(declaration, report).verdict == "mismatch", str(case)
    assert failed


def mixture(scale=1.0):
    """Each token times the weight of the expert that its logits choose; the logits are stored in bfloat16."""

    def sharded_mixture(mesh, x, router, weight):
        chosen = (x @ router).argmax(-1)
        return (x.float() * weight.float()[chosen][:, None] * scale).to(x.dtype)

    def reference(x, router, weight):
        return x * weight[(x @ router).argmax(-1)][:, None]

    return scheme(
        reference=reference, mesh={"tp": (1,)}, inputs={"x": "b d tp=I", "router": "d e tp=I", "weight": "e tp=I"},
        outputs="b d tp=I", dims={"b": (64,), "d": (16,), "e": (8,)}, dtypes=("bfloat16",), nograd=("router",),
        draw={name: values("normal") for name in ("x", "router", "weight")}, roundings=2,
    )(sharded_mixture)  # fmt: skip


@pytest.mark.slow
def test_a_correct_bfloat16_mixture_of_experts_passes():
    declaration = mixture()
    verdicts = set()
    for seed in range(30):
        try:
            verdicts.add(check(declaration.case(seed=seed)).verdict)
        except Undecided as undecided:
            assert CHOICE in str(undecided)
            verdicts.add("undecided")
    assert verdicts == {"equal", "undecided"}


@pytest.mark.usefixtures("unexplained")
def test_a_wrong_mixture_of_experts_is_a_mismatch():
    assert mixture(1.25).verify(examples=10).verdict == "mismatch"


def clipped_ratio(function, **more):
    """The smaller of a ratio of probabilities and the ratio between 0.8 and 1.2, whose gradient jumps there."""
    return scheme(
        reference=lambda new, old: jnp.minimum(jnp.exp(new - old), jnp.clip(jnp.exp(new - old), 0.8, 1.2)),
        mesh={"tp": (1,)}, inputs={"new": "b v tp=I", "old": "b v tp=I"}, outputs="b v tp=I", nograd=("old",),
        dims={"b": (8,), "v": (512,)}, dtypes=("bfloat16",), draw=dict.fromkeys(("new", "old"), values("normal")),
        **more,
    )(lambda mesh, new, old: function((new - old).exp()))  # fmt: skip


def least_of(low, high):
    return lambda ratio: torch.minimum(ratio, ratio.clamp(low, high))


def test_a_jump_within_the_rounding_of_an_intermediate_is_undecided():
    """A ratio of 1.206 and the limit of 1.2 are the same number in bfloat16."""
    declaration = clipped_ratio(least_of(0.8, 1.2))
    reports = [verify_case(declaration, declaration.case(seed=seed)) for seed in range(4)]
    assert any(report.failed for report in reports)
    marked = [report if report.ok else mark_undecided(declaration, report) for report in reports]
    assert not any(report.failed for report in marked)
    assert {report.undecided_reason for report in marked if report.is_undecided} == {CHOICE}


@pytest.mark.parametrize(
    ("function", "promise"),
    [
        pytest.param(least_of(0.8, 1.25), {}, id="another limit"),
        pytest.param(lambda ratio: ratio.clamp(0.8, 1.2), {}, id="no minimum"),
        pytest.param(lambda ratio: least_of(0.8, 1.2)(ratio * 1.01), {}, id="a hundredth more"),
        pytest.param(least_of(0.8, 1.2), {"sums": "float32"}, id="promised in float32"),
    ],
)
def test_a_mistake_beside_such_a_jump_is_a_mismatch(function, promise):
    declaration = clipped_ratio(function, **promise)
    report = verify_case(declaration, declaration.case(seed=0))
    assert mark_undecided(declaration, report).verdict == "mismatch"


def test_a_wrong_integer_beside_bfloat16_is_a_mismatch():
    """An integer has no rounding, of which a stored intermediate would have one more."""

    def last(mesh, x) -> Int[torch.Tensor, "t"]:
        return x.argmax(-1) + 1

    declaration = scheme(
        reference=lambda x: x.argmax(-1), mesh={"dp": (1, 2)}, inputs={"x": "t/dp e"}, outputs="t/dp",
        dims={"e": (8,)}, dtypes=("bfloat16",), draw={"x": values("normal")},
    )(last)  # fmt: skip
    assert verify_or_undecided(declaration, declaration.case(dp=1, t=4, e=8)).verdict == "mismatch"


def router(function):
    """The largest probabilities of each token: libraries take others of many equal ones."""
    return scheme(
        reference=lambda x: jax.lax.top_k(jax.nn.softmax(x, -1), 2)[0], mesh={"dp": (1, 2)}, inputs={"x": "t/dp e"},
        outputs="t/dp k", dims={"k": (2,), "e": (8,)}, dtypes=("float32",),
    )(lambda mesh, x: function(x.softmax(-1)))  # fmt: skip


ZEROS_BESIDE_LARGE = {"kind": "zeros", "border": ["large", 5, "last"]}


@pytest.mark.parametrize("value", [{"kind": "zeros"}, ZEROS_BESIDE_LARGE, {"kind": "ones"}, {"kind": "tiny"}], ids=str)
def test_whichever_of_equal_probabilities_is_taken_the_case_is_undecided(value):
    """The last two of eight: of orders at random, few have them first."""
    declaration = router(lambda p: p.flip(-1).sort(dim=-1, descending=True, stable=True).values[..., :2])
    for seed in range(4):
        case = declaration.case(dp=1, t=4, e=8, k=2, seed=seed).replace(values={"x": value})
        assert verify_or_undecided(declaration, case).verdict in ("undecided", "equal")


@pytest.mark.parametrize("value", [{"kind": "zeros"}, {"kind": "ones"}], ids=str)
def test_a_third_of_equal_probabilities_is_a_mismatch(value):
    """The gradient goes to one expert too many, which no order of the experts gives."""
    declaration = router(lambda p: p.sort(-1, descending=True).values[..., :2] + p.sum(-1, keepdim=True) * p[..., :1])
    case = declaration.case(dp=1, t=4, e=8, k=2).replace(values={"x": value})
    assert verify_or_undecided(declaration, case).verdict == "mismatch"


def hidden_layer(function, **more):
    """A layer whose products may underflow: its relu is then at 0, where the reference has a small number."""
    return scheme(
        reference=lambda x, w: jax.nn.relu(x @ w).sum(-1), mesh={"tp": (1,)}, inputs={"x": "b d tp=I", "w": "d h tp=I"},
        outputs="b tp=I", dims={"d": (1, 5), "h": (1, 8)}, **{"dtypes": ("float32", "bfloat16"), **more},
    )(lambda mesh, x, w: function(x @ w).sum(-1))  # fmt: skip


def tiny(declaration, dtype, **sizes):
    case = declaration.case(dtype=dtype, b=3, **sizes)
    return case.replace(values={name: {"kind": "tiny"} for name in ("x", "w")})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("h", [1, 8])
@pytest.mark.parametrize("d", [1, 5])
def test_a_kink_that_a_product_reaches_by_underflow_is_undecided(d, h, dtype):
    declaration = hidden_layer(torch.relu)
    report = verify_case(declaration, tiny(declaration, dtype, d=d, h=h))
    assert report.failed and mark_undecided(declaration, report).undecided_reason == CHOICE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_that_underflow_excuse_no_other_gradient(dtype):
    declaration = hidden_layer(lambda x: 1.5 * x)
    report = verify_case(declaration, tiny(declaration, dtype, d=5, h=8))
    assert mark_undecided(declaration, report).verdict == "mismatch"


@pytest.mark.parametrize(("high", "verdict"), [(1.0, "undecided"), (1.01, "mismatch")])
def test_ones_at_a_limit_are_a_tie_beside_large_numbers_too(high, verdict):
    """Equal numbers move by their own rounding also, not by the rounding of the large numbers alone."""
    declaration = scheme(
        reference=lambda x: jnp.clip(x, -1.0, 1.0), mesh={"tp": (2,)}, inputs={"x": "b d/tp"}, outputs="b d/tp",
        dtypes=("float32",),
    )(lambda mesh, x: x.clamp(-1.0, high))  # fmt: skip
    case = declaration.case(tp=2, b=1, d=4, seed=0)
    case = case.replace(values={"x": {"kind": "ones", "border": ["large", 0, "all"]}})
    assert mark_undecided(declaration, verify_case(declaration, case)).verdict == verdict


def test_under_hypothesis_an_undecided_example_is_replaced_by_another():
    declaration, judged = greatest(), []

    @settings(max_examples=20, database=None)
    @given(every_case(declaration, tp=1, b=8))
    def test(case):
        judged.append(check(case))

    test()
    assert judged and all(report.ok for report in judged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_rounding_makes_equal_are_no_tie(dtype):
    """32,768 normal numbers are distinct as drawn: in bfloat16 most are equal to others, in float32 some are."""
    declaration = greatest(kinds=("normal",), dtypes=(dtype,), dims={"v": (4096,)})
    case = declaration.case(tp=1, b=8, v=4096, seed=0, dtype=dtype)
    full = Program.of(declaration).full_array(declaration.inputs[0], case)
    assert np.unique(full).size < full.size and not undecided._is_tie(declaration, case)


def test_the_example_of_an_undecided_scheme_is_an_undecided_one():
    declaration = greatest(kinds=("normal", "ties"))
    report = declaration.verify(b=8, examples=8)
    assert report.verdict == "undecided" and report.undecided_examples < report.examples
    cases = [report.case, *report.case_of_tensor.values()]
    assert all(verify_or_undecided(declaration, case).is_undecided for case in cases)
    assert not all(tensor.ok for tensor in report.tensors)
