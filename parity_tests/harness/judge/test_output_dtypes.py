"""`wide` makes the dtype of an output part of a declaration."""

import sys
from types import ModuleType

import pytest
import torch

from shardproof import scheme


def declared(fn, outputs="b v/tp", **promise):
    return scheme(
        reference=lambda x: 2.0 * x if outputs == "b v/tp" else (2.0 * x, x * x),
        mesh={"tp": (1, 2)}, inputs={"x": "b v/tp"}, outputs=outputs, engines=("lockstep",),
        excluded_conditions=("inference_mode", "second_derivative"), **promise,
    )(fn)  # fmt: skip


def of_its_dtype(mesh, x):
    return 2 * x


def widened(mesh, x):
    return 2 * x.to(torch.promote_types(x.dtype, torch.float32))


@pytest.mark.parametrize(("fn", "wide"), [(of_its_dtype, False), (widened, True), (widened, ("out",))])
def test_outputs_of_the_declared_dtypes_pass(fn, wide):
    assert declared(fn, wide=wide).verify(examples=4).ok


@pytest.mark.parametrize(
    ("fn", "wide", "says"),
    [
        (of_its_dtype, True, "'out' is bfloat16, declared float32"),
        (widened, False, "'out' is float32, declared bfloat16"),
    ],
)
def test_an_output_of_another_dtype_is_a_finding(fn, wide, says):
    assert declared(fn).verify(examples=8).ok
    report = declared(fn, wide=wide).verify(examples=8)
    assert report.verdict == "hygiene" and f"{says} for bfloat16 inputs" in str(report)


def test_each_output_has_its_own():
    def both(mesh, x):
        return 2 * x, (x * x).float()

    of_two = ("b v/tp", "b v/tp")
    assert declared(both, of_two, wide=("out[1]",), dtypes=("bfloat16", "float32")).verify(examples=4).ok
    assert not declared(both, of_two, wide=("out[0]",)).verify(examples=8).ok


def test_a_package_declares_it_for_its_schemes(monkeypatch):
    package = ModuleType("narrow")
    vars(package)["WIDE_OUTPUTS"] = False
    monkeypatch.setitem(sys.modules, "narrow", package)

    def of_the_package(mesh, x):
        return 2 * x

    of_the_package.__module__ = "narrow.room"
    assert declared(of_the_package).wide == () and declared(of_the_package, wide=True).wide == ("out",)
    assert declared(of_its_dtype).wide is None


@pytest.mark.parametrize("wide", ["out", ("in",), 3])
def test_a_wrong_name_is_rejected(wide):
    with pytest.raises(ValueError, match=r"wide is .*; name outputs of .out. in a tuple, or write True for all"):
        declared(of_its_dtype, wide=wide)


@pytest.mark.parametrize("inputs", ["x", ("in",), None])
def test_a_wrong_input_is_rejected(inputs):
    with pytest.raises(ValueError, match=r"wider_inputs is .*; name inputs of \(x\) in a tuple"):
        declared(of_its_dtype, wider_inputs=inputs)
