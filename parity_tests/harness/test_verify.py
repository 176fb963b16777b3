"""The cases that `verify` draws when few or many sizes are given."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shardproof import ValueMismatch, scheme, values
from shardproof.compared import NothingCompared
from shardproof.draw import profiles
from shardproof.draw.drawing import meshes_left_out
from shardproof.verification import VALUE_EXAMPLES, check_cases, verify


def declared(function, **more):
    return scheme(
        **{
            "reference": lambda x: x * 3.0, "mesh": {"tp": (2,)}, "inputs": {"x": "b/tp"}, "outputs": "b/tp",
            "draw": {"x": values("normal")}, "dtypes": ("float32", "bfloat16"), **more,
        }
    )(function)  # fmt: skip


def wrong_in_bfloat16(mesh, x):
    return x * (3 if x.dtype != torch.bfloat16 else 2)


@pytest.mark.slow
def test_with_all_dims_passed_each_dtype_is_tried():
    declaration = declared(wrong_in_bfloat16)
    assert declaration.verify(tp=2, b=6, dtype="float32").ok
    report = declaration.verify(tp=2, b=6)
    assert not report.ok and report.case.dtype == "bfloat16"
    assert declaration.verify(tp=2, b=6, examples=1).examples == 1


@pytest.mark.slow
def test_with_all_dims_passed_each_mesh_that_fits_them_is_tried():
    def wrong_on_three_ranks(mesh, x):
        return x * (2 if mesh.size("tp") == 3 else 3)

    declaration = declared(wrong_on_three_ranks, mesh={"tp": (1, 2, 3, 4)})
    for seed in range(4):
        report = declaration.verify(b=6, seed=seed)  # 4 ranks cannot shard it
        assert not report.ok and dict(report.case.mesh) == {"tp": 3}, seed
        assert declaration.verify(b=4, seed=seed).meshes == ("tp=1", "tp=2", "tp=4")


def tripled(mesh, x):
    return x * 3


@pytest.mark.usefixtures("unexplained")
def test_a_case_on_several_ranks_is_run_however_few_are_asked_for():
    """On one rank nothing is sharded, so a mistake cannot show."""
    declaration = declared(lambda mesh, x: x * 3 * mesh.size("tp"), mesh={"tp": (1, 2)})
    reports = [declaration.verify(examples=1, seed=seed) for seed in range(4)]
    reports += [verify(declaration, limit_s=0.0), declaration.verify(examples=1, seed=0, b=6)]
    assert [report.ok for report in reports] == [False] * len(reports)
    assert declaration.verify(examples=1, tp=1).ok and verify(declaration, fixed={"tp": 1}, limit_s=0.0).examples == 1


@pytest.mark.slow
def test_meshes_that_do_not_divide_the_sizes_are_named_with_the_reason():
    declaration = declared(
        tripled, mesh={"dp": (1, 2), "tp": (1, 2, 4)}, inputs={"x": "b/tp dp=I"}, outputs="b/tp dp=I"
    )
    reason = "b=6 cannot be sharded by contiguous over tp=4 (needs a multiple of 4); pad to 8"
    report = declaration.verify(b=6)
    assert report.ok and report.meshes == ("dp=1,tp=1", "dp=1,tp=2", "dp=2,tp=1", "dp=2,tp=2")
    assert report.left_out == {"dp=1,tp=4": reason, "dp=2,tp=4": reason}
    assert str(report).splitlines()[-1] == f"  left out: dp=1,tp=4 dp=2,tp=4: {reason}"
    assert report.to_dict()["left_out"] == report.left_out
    assert declaration.verify(b=8).left_out == {} and "left out" not in str(declaration.verify(b=8))
    assert declaration.verify(b=6, tp=2).left_out == {}


def test_a_mesh_is_left_out_for_a_size_that_was_passed_not_for_a_drawn_one():
    inputs = {"x": "s/tp", "y": "b/tp"}
    declaration = declared(lambda mesh, x, y: y * 3, mesh={"tp": (1, 2, 4)}, inputs=inputs, draw={},
                    reference=lambda x, y: y * 3, dims={"s": (1, 2, 3)})  # fmt: skip
    reason = declaration.verify(b=7, examples=2).left_out
    assert reason == {
        f"tp={size}": f"b=7 cannot be sharded by contiguous over tp={size} (needs a multiple of {size}); pad to 8"
        for size in (2, 4)
    }


def test_a_mesh_that_no_drawn_size_suits_is_reported_as_such():
    declaration = declared(lambda mesh, x, y: y * 3, mesh={"tp": (2, 3)}, inputs={"x": "s/tp", "y": "b tp=I"},
                    outputs="b tp=I", draw={}, reference=lambda x, y: y * 3, dims={"s": (2, 3)})  # fmt: skip
    assert meshes_left_out(declaration, {"b": 2}) == []
    reason = "of the sizes drawn, s=2 cannot be sharded by contiguous over tp=3 (needs a multiple of 3); pad to 3"
    assert meshes_left_out(declaration, {"b": 2}, limit=1) == [({"tp": 3}, reason)]


@pytest.mark.usefixtures("unexplained")
def test_a_mistake_is_reported_with_the_meshes_that_were_left_out():
    def wrong(mesh, x):
        return x * 2

    report = declared(wrong, mesh={"tp": (1, 2)}).verify(b=7)
    assert not report.ok and list(report.left_out) == ["tp=2"] and "\n  left out: tp=2: b=7 cannot" in str(report)


def test_where_no_mesh_divides_the_sizes_there_is_no_verdict():
    with pytest.raises(ValueError) as caught:
        declared(tripled, mesh={"tp": (2, 4)}).verify(b=7)
    rule = "(needs a multiple of 4); pad to 8"
    assert str(caught.value) == f"scheme 'tripled': b=7 cannot be sharded by contiguous over tp=4 {rule}"


@pytest.mark.slow
def test_where_an_option_is_left_open_the_profile_says_how_many_cases_are_drawn():
    def wrong_in_one_option(mesh, x, chunk_size):
        return x * (2 if chunk_size == 7 else 3)

    declaration = declared(wrong_in_one_option, rank_options={"chunk_size": (1, 2, 7)}, draw={"x": values("iota")})
    for seed in range(4):
        assert declaration.verify(tp=2, b=6, seed=seed).case.options == {"chunk_size": 7}, seed
    assert declaration.verify(tp=2, b=6, chunk_size=2).examples == VALUE_EXAMPLES


def test_empty_outputs_give_no_verdict():
    """Their gradients are zeros even if the function is wrong."""

    @scheme(
        reference=lambda x, w: x * w[None], mesh={"tp": (1, 2)}, inputs={"x": "b d tp=R", "w": "d tp=R"},
        outputs="b d tp=R",
    )  # fmt: skip
    def product(mesh, x, w):
        return 3.0 * x * w

    assert product.verify(tp=2, b=2, d=3).verdict == "mismatch"
    with pytest.raises(NothingCompared, match=r"every output is empty at tp=2 b=0 d=3 .*; nothing was compared"):
        product.verify(tp=2, b=0, d=3)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("examples", [1, 2])
def test_empty_cases_are_followed_by_one_that_is_not(examples):
    right, wrong = (
        declared(lambda mesh, x, n=n: x * n, dims={"b": (0, 4)}, draw={"x": values("normal")}) for n in (3, 2)
    )
    for seed in range(8):
        verdicts = [each.verify(examples=examples, seed=seed) for each in (right, wrong)]
        assert [verdict.ok for verdict in verdicts] == [True, False] and verdicts[0].tensors[0].want.size
    assert right.verify(examples=1, tp=2, b=4).examples == 1


@pytest.mark.slow
def test_a_reference_that_is_nan_everywhere_is_equal_to_nothing():
    def root(mesh, x):
        return torch.sqrt(-1.0 - x * x)

    declaration = declared(root, reference=lambda x: jnp.sqrt(-1.0 - x * x))
    for sizes in ({}, {"tp": 2, "b": 4}, {"examples": 1}):
        with pytest.raises(ValueError) as caught:
            declaration.verify(**sizes)
        assert str(caught.value).startswith("scheme 'root': the reference of out is NaN everywhere at tp=2 b=")
        assert str(caught.value).endswith(
            "; nothing of it was compared: correct the reference, or draw values that it is defined for"
        )


def test_a_reference_may_be_nan_where_infinities_are_drawn():
    def difference(mesh, x):
        return x - x

    draw = {"x": values("neg_inf_mask", full_rows=True)}
    assert declared(difference, reference=lambda x: x - x, draw=draw, inputs={"x": "b/tp"}).verify(b=2, examples=4).ok


def test_infinities_alone_are_equal_to_nothing():
    def tripled(mesh, x):
        return x * 3

    def infinite(mesh, x):
        return x - torch.inf

    with pytest.raises(NothingCompared, match=r"the reference of out is infinite or NaN everywhere at .* correct the "):
        declared(infinite, reference=lambda x: x - jnp.inf, draw={"x": values("normal")}).verify(b=2, examples=2)
    declaration = declared(tripled, draw={"x": values("neg_inf_mask", full_rows=True)})
    refused = 0
    for seed in range(16):
        try:
            assert np.isfinite(declaration.verify(b=2, tp=2, examples=1, seed=seed).tensors[0].want).any()
        except NothingCompared as nothing:
            refused += "nothing of it was compared: infinities or NaN were drawn, give more examples" in str(nothing)
    assert refused > 0


def test_a_missing_gradient_is_distinguished_from_a_zero_one():
    def detached(mesh, x):
        return x.detach() * 3 + (0 * x if mesh.size("tp") > 1 else 0)

    declaration = declared(detached, mesh={"tp": (1, 2)}, dtypes=("float32",))
    none, zero = declaration.verify(tp=1, b=4), declaration.verify(tp=2, b=4)
    assert none.notes["d/d x"][0] == "no gradient was returned (None): backward does not reach this input"
    assert zero.notes["d/d x"][0] == "gradient is zero: backward does not reach this input"
    assert "inf" not in str(none) + str(zero)


def test_a_missing_gradient_on_one_rank_is_reported_with_the_rank():
    def forgetful(mesh, x):
        return (x if mesh.rank("tp") == 0 else x.detach()) * 3

    report = declared(forgetful, dtypes=("float32",)).verify(b=4)
    note = "no gradient was returned (None) by tp rank 1: backward does not reach this input there"
    assert report.notes["d/d x"][0] == note


def test_a_missing_gradient_is_reported_where_the_expected_one_is_within_its_budget():
    def detached(mesh, x, y):
        return x * 3

    declaration = declared(detached, inputs={"x": "b/tp", "y": "b/tp"}, dtypes=("float32",), draw={},
                    reference=lambda x, y: 3.0 * x + 1e-42 * y)  # fmt: skip
    report = declaration.verify(b=4)
    assert not report.ok and report.notes["d/d y"] == (
        "no gradient was returned (None): backward does not reach this input",
        "the reference's gradient is not zero, although below its budget: return zeros, or let backward reach it",
    )


def test_a_note_on_one_element_comes_from_a_larger_case():
    def doubled_besides(mesh, x):
        return x * 6

    report = declared(doubled_besides, inputs={"x": "b tp=I"}, outputs="b tp=I", dtypes=("float32",)).verify()
    assert report.notes["out"][0].startswith(
        "off by the constant factor 2 (= tp): "
        "a reduction is missing or repeated, or a mean divides by a local count (at "
    )
    assert len(report.notes["out"]) == 1


@pytest.mark.usefixtures("unexplained")
def test_nothing_is_compared_if_large_numbers_cancel_in_the_reference():
    """The reference's budget would accept three times the value, and zeros too."""

    def tripled(mesh, x):
        return x * 3

    assert not declared(tripled, reference=lambda x: 2.0 * x + (x - x)).verify(examples=2, tp=2).ok
    declaration = declared(tripled, reference=lambda x: 2.0 * x + (1e12 * x - 1e12 * x))
    with pytest.raises(NothingCompared, match=r"the budget of out is \S+ for values up to .*: zeros would be accepted"):
        declaration.verify(examples=2, tp=2)


def test_the_one_tensor_with_too_large_a_budget_is_named():
    def scaled_and_kept(mesh, x, y):
        return x * 3, y * 1

    normal = {"x": values("normal"), "y": values("normal")}
    both = {"inputs": {"x": "b/tp", "y": "b/tp"}, "outputs": ("b/tp", "b/tp"), "draw": normal}
    declaration = declared(scaled_and_kept, **both, reference=lambda x, y: (x * 3, (1e12 + y) - 1e12))
    with pytest.raises(NothingCompared, match=r"the budget of out\[1\] is \S+ for values up to "):
        declaration.verify(examples=2, tp=2)


def test_a_gradient_that_is_undefined_in_every_case_is_compared_to_nothing():
    """The output is NaN in every case, so the weight's gradient is too, and any gradient would pass."""

    def rooted(mesh, x, w):
        return torch.sqrt(x * (3 * w - 2 * w.detach()).sum())

    both = {"inputs": {"x": "b/tp", "w": "v tp=R"}, "draw": {"x": values("normal"), "w": values("normal")}}
    declaration = declared(rooted, **both, reference=lambda x, w: jnp.sqrt(x * w.sum()), dims={"b": (16,)})
    with pytest.raises(NothingCompared, match=r"d/d w.* everywhere at .*; nothing of it was compared: correct the "):
        declaration.verify(examples=4)


def test_zeros_are_compared_where_zeros_are_right():
    def nothing(mesh, x):
        return x * 0

    assert declared(nothing, reference=lambda x: (x + x) - 2.0 * x).verify(examples=2, tp=2).ok


def test_a_failing_case_of_pytest_is_printed_once(tmp_path, monkeypatch):
    """The report shows the case and its replay, so Hypothesis must not add its record of the example."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueMismatch, match="replay: python replay_") as caught:
        check_cases(declared(wrong_in_bfloat16), examples=20, dtype="bfloat16")
    assert not any("CaseSpec(" in note for note in getattr(caught.value, "__notes__", ()))


def test_fast_cases_have_the_dtype_and_the_world_that_are_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with profiles.in_force("fast"), pytest.raises(ValueMismatch):
        check_cases(declared(wrong_in_bfloat16), dtype="bfloat16", inside_subgroup=True)
    with profiles.in_force("fast"):
        check_cases(declared(wrong_in_bfloat16), dtype="float32", world=2)
