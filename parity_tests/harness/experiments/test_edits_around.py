"""Edits that make every tensor right and name the wrong line: another branch, or the call of a wrong function."""

import importlib.util

import torch
import torch.distributed as dist

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


def weighted_in_chunks(mesh, x, w):
    size, parts = min(2, len(x)), []
    for start in range(0, len(x), size):
        part = x[start : start + size]
        parts.append(part * w[: len(part)])
    return torch.cat(parts)


def test_a_loop_of_one_round_hides_no_line():
    """With `max(2, len(x))` there is one chunk, which takes the right weights."""
    note = first_note(
        weighted_in_chunks, lambda x, w: x * w, {"x": "s/tp d", "w": "s/tp d"}, "s/tp d", {"tp": 2, "s": 8, "d": 3},
        nograd=("x", "w"), dims={"s": (4, 6, 8, 10)},
    )  # fmt: skip
    assert not note.startswith(RIGHT_ONCE)


def read_before_its_wait(mesh, x):
    total = torch.zeros(4) + x.detach().sum()
    started = dist.all_reduce(total, group=mesh["tp"], async_op=True)
    last = total[-1].item()
    started.wait()
    return 2 * x + 0 * last


def test_a_number_in_place_of_one_that_is_read_too_early_hides_no_collective():
    """Any finite number makes it right."""
    note = first_note(read_before_its_wait, lambda x: 2.0 * x, {"x": "s/tp d"}, "s/tp d", {"tp": 2, "s": 8, "d": 3})
    line = line_of(read_before_its_wait, "all_reduce")
    assert note.endswith(f"read before its wait: all_reduce at {line}")


LIBRARY = """
from torch_impl.collectives import all_reduce

def damped(x, own_rows, group_of_rows):
    mean = all_reduce(x.sum(0), group_of_rows) / own_rows
    return x / (1 + mean * mean)
"""


def test_a_wrong_function_is_named_before_its_call(tmp_path):
    """Either line may take the number of ranks, the call with fewer letters."""
    file = tmp_path / "library.py"
    file.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("library", file)
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)

    def of_a_library(mesh, x):
        return library.damped(x, len(x), mesh["tp"])

    note = first_note(
        of_a_library, lambda x: x / (1.0 + x.mean(0, keepdims=True) ** 2), {"x": "s/tp d"}, "s/tp d",
        {"tp": 2, "s": 8, "d": 3}, nograd=("x",),
    )  # fmt: skip
    assert note.startswith(f"{RIGHT_ONCE}library.py:5 has ")
    assert "or once" not in note
