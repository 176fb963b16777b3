"""The long case: a running sum in bfloat16 is a mismatch, whatever a scheme says of its roundings."""

import numpy as np
import pytest
import torch

from shardproof import scheme, values, verify
from shardproof.declare.case import CaseSpec
from shardproof.draw import inputs, recorded
from shardproof.draw.long_case import ELEMENTS, LEAST, long_case
from shardproof.draw.profiles import EXAMPLES, profile
from shardproof.engines.program import Program


def scheme_with_bias(wide, **more):
    """Rows and a bias, whose gradient autograd adds up row by row, in the bias's dtype or in float32."""

    def function(mesh, x, bias):
        bias = bias.to(wide or bias.dtype)
        return torch.stack([(row.float() * 2 + bias).to(x.dtype) for row in x])

    declared = {
        "reference": lambda x, bias: x * 2.0 + bias[None],
        "mesh": {"tp": (1, 2, 4)},
        "inputs": {"x": "t/tp d", "bias": "d tp=R"},
        "outputs": "t/tp d",
        "draw": {"x": values("normal", "zeros"), "bias": values("normal")},
        "roundings": 6,
    }
    return scheme(**{**declared, **more})(function)


class Found(Exception):
    """Ends a run at its first failure, so that no time is spent on a smaller case."""


def stop(report):
    raise Found(report)


@pytest.mark.parametrize("seed", range(3))
def test_a_running_sum_in_bfloat16_is_a_mismatch(seed):
    with pytest.raises(Found) as found:
        verify(scheme_with_bias(None), seed=seed, found=stop)
    (report,) = found.value.args
    assert report.verdict == "mismatch" and report.examples == EXAMPLES[profile()]
    assert [tensor.label for tensor in report.tensors if not tensor.ok] == ["d/d bias"]


@pytest.mark.slow
def test_a_smaller_case_is_reported(tmp_path):
    report = verify(scheme_with_bias(None), replay_folder=str(tmp_path))
    assert (report.verdict, report.case.dtype) == ("mismatch", "bfloat16") and 256 < report.case.t < 1024


def test_drawn_examples_do_not_show_the_running_sum():
    assert verify(scheme_with_bias(None), examples=20).ok


def test_a_sum_in_float32_passes():
    report = verify(scheme_with_bias(torch.float32))
    assert report.ok and report.examples == EXAMPLES[profile()]


def test_all_numbers_lie_between_a_half_and_one():
    declared = scheme_with_bias(None)
    case = long_case(declared, {}, seed=0)
    assert (case.dtype, case.mesh) == ("bfloat16", {"tp": 2}) and LEAST <= case.t <= ELEMENTS
    program = Program.of(declared)
    numbers = [program.full_array(arg, case) for arg in declared.inputs]
    numbers += [inputs.cotangent(arg, case) for arg in declared.outputs]
    assert all(((array >= 0.5) & (array <= 1.0)).all() and np.unique(array).size > 2 for array in numbers)


def test_the_long_case_is_recorded_like_any_case():
    declared = scheme_with_bias(None)
    case = long_case(declared, {}, seed=0)
    recorded.check(declared, case)
    again = CaseSpec.from_json(case.json)
    (out,) = declared.outputs
    assert np.array_equal(inputs.cotangent(out, again), inputs.cotangent(out, case))


@pytest.mark.parametrize(
    ("more", "fixed"),
    [({"dtypes": ("float32",)}, {}), ({"dims": {"t": (8, 16)}}, {}), ({}, {"t": 8})],
    ids=["no bfloat16", "listed sizes", "a given size"],
)
def test_schemes_without_a_long_case(more, fixed):
    assert long_case(scheme_with_bias(None, **more), fixed, seed=0) is None


def test_rows_are_not_lengthened_where_outputs_reduce_over_them():
    """Attention, for one, makes a number for each pair of rows."""
    declared = scheme_with_bias(None, reduction=("t",))
    assert long_case(declared, {}, seed=0) is None
