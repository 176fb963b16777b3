"""Outputs without a cotangent, and rows whose cotangent no gradient depends on."""

import re
from dataclasses import replace

import jax.numpy as jnp
import pytest
import torch

from shardproof import scheme, values
from shardproof.declare.declaration_failure import DeclarationFailure
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.verify_one_case import verify_case


def test_an_output_without_a_cotangent_has_no_part_in_the_gradient():
    """Where its derivative is infinite, 0 times it would be NaN."""

    @scheme(
        reference=lambda a: (2.0 * a, jnp.sqrt(0.0 * a)), mesh={"tp": (1, 2)}, inputs={"a": "b v/tp"},
        outputs=("b v/tp", "b v/tp"), draw={"a": values("normal")}, dtypes=("float32",), engines=("lockstep",),
    )  # fmt: skip
    def doubled_and_root_of_zero(mesh, a):
        return 2 * a, (0 * a).sqrt()

    case = draw_case(doubled_and_root_of_zero, seeded_chooser(0), {"tp": 2})
    report = verify_case(doubled_and_root_of_zero, case.replace(conditions={"unused": ["out[1]"]}))
    assert report.ok, str(report)


def test_an_output_that_is_nan_leaves_the_gradient_undefined_without_a_cotangent_too():
    """Two outputs in one message: the one without a cotangent gets zeros back, and 0 * nan is nan."""

    @scheme(
        reference=lambda a: (2.0 * a, jnp.sqrt(a)), mesh={"tp": (1, 2)}, inputs={"a": "b v/tp"},
        outputs=("b v/tp", "b v/tp"), draw={"a": values("normal")}, dtypes=("float32",), engines=("lockstep",),
    )  # fmt: skip
    def doubled_and_root_in_one_message(mesh, a):
        return torch.cat([factor * a, a.sqrt()], -1).split(a.shape[-1], -1)

    for factor in (2, 3):
        case = draw_case(doubled_and_root_in_one_message, seeded_chooser(0), {"tp": 2, "b": 4, "v": 8})
        report = verify_case(doubled_and_root_in_one_message, case.replace(conditions={"unused": ["out[1]"]}))
        assert report.ok == (factor == 2), str(report)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (lambda case, inputs: None, "returned NoneType; return bools over leading dims of [2, 3]"),
        (lambda case, inputs: inputs["a"], "returned float64 [2, 3]; return bools over leading dims of [2, 3]"),
        (lambda case, inputs: inputs["a"].T > 0, "returned bool [3, 2]; return bools over leading dims of [2, 3]"),
        (lambda case, inputs: inputs["c"], "there is no input 'c', but a, b"),
        (lambda case, inputs: 1 / 0, "raised ZeroDivisionError at test_absent_cotangents.py"),
    ],
)
def test_rows_that_no_gradient_depends_on_are_bools_over_leading_dims(rows, sentence):
    @scheme(
        reference=lambda a, b: a * b,
        mesh={"tp": (1,)}, inputs={"a": "b v/tp", "b": "b v/tp"}, outputs="b v/tp", nan_cotangents={"out": rows},
    )  # fmt: skip
    def product(mesh, a, b):
        return a * b

    case = replace(product.case(b=2, v=3, tp=1), conditions={"nan_cotangents": ["out"]})
    with pytest.raises(DeclarationFailure, match=re.escape(sentence)):
        verify_case(product, case)
