"""An error is one of a narrow dtype only where a tensor has that dtype."""

import pytest

from parity_tests.specimens.small_scheme import declared
from shardproof.declare.case import CaseSpec
from shardproof.experiments.narrow_tensors import has_narrow_tensors
from shardproof.experiments.notes import check_notes
from shardproof.verify_one_case import verify_case

CASE = CaseSpec("doubled", {"tp": 2}, {"b": 16}, values={"x": {"kind": "normal"}})


def in_bfloat16(x):
    return (x.bfloat16() + x.bfloat16()).to(x.dtype)


def with_a_neighbour(x):
    """A thousandth of another element: as large as a rounding to bfloat16, and none."""
    return 2 * x + 1e-3 * x.roll(1, 0)


@pytest.mark.parametrize(("function", "is_narrow"), [(in_bfloat16, True), (with_a_neighbour, False)])
def test_bfloat16_accumulation_needs_a_bfloat16_tensor(function, is_narrow):
    declaration = declared(lambda mesh, x: function(x))
    report = verify_case(declaration, CASE)
    assert any("bfloat16 accumulation" in note for note in report.notes["out"])
    assert has_narrow_tensors(declaration, CASE) == is_narrow
    if not is_narrow:
        assert "bfloat16" not in "".join(check_notes(declaration, report).notes["out"])
