"""Edits that make every tensor right and name the wrong line: another branch."""

import torch

from parity_tests.harness.experiments.test_edited_lines import first_note
from parity_tests.specimens.wrong_gradients import line_of
from shardproof.experiments.edited_programs import RIGHT_ONCE


def squares_of_first_rows(mesh, x):
    n = len(x)
    if n > 0:
        squares = torch.empty_like(x)
        for i in range(n):
            squares[i] = x[0].square()
        return squares
    return x.square()


def test_a_branch_that_no_case_takes_hides_no_line():
    """With `n < 0` every case is right, and the loop never runs."""
    note = first_note(
        squares_of_first_rows, lambda x: x * x, {"x": "s/tp d"}, "s/tp d", {"tp": 2, "s": 8, "d": 3}, nograd=("x",)
    )
    line = line_of(squares_of_first_rows, "x[0]")
    assert note == f"{RIGHT_ONCE}{line} has `x[i].square()`, not `x[0].square()`"
