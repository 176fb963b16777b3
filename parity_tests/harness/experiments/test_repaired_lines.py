"""Lines of collectives whose repair makes a gradient right."""

import pytest

from parity_tests.specimens.noted_scheme import notes
from parity_tests.specimens.user_files import module_of

SQUARES = """
from shardproof import scheme, values
from torch_impl.collectives import all_reduce


def squares(mesh, x):
    total = x.float().square().sum()
    total = all_reduce(total, mesh["dp"], out="R")
    return all_reduce(total, mesh["cp"], out="R")


def declared(ranks):
    return scheme(
        reference=lambda x: (x * x).sum(), mesh={"dp": ranks, "cp": ranks}, inputs={"x": "b/dp s/cp"},
        outputs="dp=I cp=I", draw={"x": values("normal")}, dtypes=("float32",),
    )(squares)
"""


@pytest.mark.parametrize(("file", "ranks"), [("fixed.py", (2,)), ("chosen.py", (1, 2))])
def test_two_lines_with_the_same_mistake_are_both_named(file, ranks, tmp_path):
    """The smallest case of the second has one rank on an axis, where one of the two lines issues nothing."""
    report = module_of(tmp_path / file, SQUARES).declared(ranks).verify()
    wanted = f"forward equal, gradient not: all_reduce at {file}:8 and all_reduce at {file}:9 [bwd] are too many"
    assert wanted in notes(report)


def test_no_line_of_a_trusted_function_is_to_be_edited(tmp_path):
    """A division in the backward of `all_reduce` would make this user's gradient right, and all others wrong."""
    report = module_of(tmp_path / "trusting.py", SQUARES).declared((1, 2)).verify()
    assert [note for note in notes(report) if "right once" in note] == []
