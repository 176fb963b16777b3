"""What `verify` draws when little or much is given."""

import jax.numpy as jnp
import pytest
import torch

from parity_tests import scheme, values


def declared(function, **more):
    return scheme(
        **{
            "reference": lambda x: x * 3.0, "mesh": {"tp": (2,)}, "inputs": {"x": "b/tp"}, "outputs": "b/tp",
            "draw": {"x": values("normal")}, "dtypes": ("float32", "bfloat16"), **more,
        }
    )(function)  # fmt: skip


def wrong_in_bfloat16(mesh, x):
    return x * (3 if x.dtype != torch.bfloat16 else 2)


def test_where_all_dims_are_given_each_dtype_is_tried():
    made = declared(wrong_in_bfloat16)
    assert made.verify(tp=2, b=6, dtype="float32").ok
    report = made.verify(tp=2, b=6)
    assert not report.ok and report.case.dtype == "bfloat16"
    assert made.verify(tp=2, b=6, examples=1).examples == 1


def test_where_all_dims_are_given_each_mesh_that_fits_them_is_tried():
    def wrong_on_three_ranks(mesh, x):
        return x * (2 if mesh.size("tp") == 3 else 3)

    made = declared(wrong_on_three_ranks, mesh={"tp": (1, 2, 3, 4)})
    for seed in range(4):
        report = made.verify(b=6, seed=seed)  # 4 ranks cannot cut it
        assert not report.ok and dict(report.case.mesh) == {"tp": 3}, seed
        assert made.verify(b=4, seed=seed).meshes == ("tp=1", "tp=2", "tp=4")


def test_where_an_option_is_left_open_the_profile_says_how_many_cases_are_drawn():
    def wrong_in_one_option(mesh, x, chunk_size):
        return x * (2 if chunk_size == 7 else 3)

    made = declared(wrong_in_one_option, rank_options={"chunk_size": (1, 2, 7)}, draw={"x": values("iota")})
    for seed in range(4):
        assert made.verify(tp=2, b=6, seed=seed).case.options == {"chunk_size": 7}, seed
    assert made.verify(tp=2, b=6, chunk_size=2).examples == len(made.dtypes)


def test_a_reference_that_is_nan_everywhere_is_equal_to_nothing():
    def root(mesh, x):
        return torch.sqrt(-1.0 - x * x)

    made = declared(root, reference=lambda x: jnp.sqrt(-1.0 - x * x))
    for given in ({}, {"tp": 2, "b": 4}, {"examples": 1}):
        with pytest.raises(ValueError) as caught:
            made.verify(**given)
        assert str(caught.value).startswith("scheme 'root': the reference of out is NaN everywhere at tp=2 b=")
        assert str(caught.value).endswith("; nothing of it was compared: mend it, or draw values that it is made for")


def test_a_reference_may_be_nan_where_infinities_are_drawn():
    def difference(mesh, x):
        return x - x

    draw = {"x": values("neg_inf_mask", full_rows=True)}
    assert declared(difference, reference=lambda x: x - x, draw=draw, inputs={"x": "b/tp"}).verify(b=2, examples=4).ok


def test_a_note_on_one_element_comes_from_a_larger_case():
    def doubled_besides(mesh, x):
        return x * 6

    report = declared(doubled_besides, inputs={"x": "b tp=I"}, outputs="b tp=I", dtypes=("float32",)).verify()
    assert report.notes["out"][0].startswith(
        "off by the constant factor 2 (= tp): a reduction is missing or repeated (at "
    )
    assert len(report.notes["out"]) == 1
