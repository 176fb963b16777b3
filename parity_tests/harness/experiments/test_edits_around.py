"""Edits that make every tensor right and name the wrong line: another branch, or the call of a wrong function."""

import sys

import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from parity_tests.harness.experiments.test_edited_lines import first_note
from parity_tests.specimens.noted_scheme import declared
from parity_tests.specimens.user_files import module_of
from parity_tests.specimens.wrong_gradients import line_of
from shardproof import token_below, values
from shardproof.experiments.edited_lines import OR_CALLED, _files_around, _leads_around_torch
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.experiments.line_edits import edits_of
from shardproof.experiments.live_objects import caches
from shardproof.experiments.notes import check_notes
from shardproof.experiments.running_lines import running_functions
from shardproof.verify_one_case import verify_case


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
    library = module_of(tmp_path / "library.py", LIBRARY)

    def of_a_library(mesh, x):
        return library.damped(x, len(x), mesh["tp"])

    note = first_note(
        of_a_library, lambda x: x / (1.0 + x.mean(0, keepdims=True) ** 2), {"x": "s/tp d"}, "s/tp d",
        {"tp": 2, "s": 8, "d": 3}, nograd=("x",),
    )  # fmt: skip
    assert note.startswith(f"{RIGHT_ONCE}library.py:5 has ")
    assert "or once" not in note


ROWS_OF_IDS = """
import torch
from torch_impl.collectives import reduce_scatter

def rows_of_ids(mesh, weight, ids):
    tp = mesh["tp"]
    first = mesh.global_ids("v")[0]
    local = ids - first
    here = (local >= 0) & (local <= weight.shape[0])
    rows = torch.where(here[..., None], weight[local.clamp(0, weight.shape[0] - 1)], 0.0)
    return reduce_scatter(rows, tp, dim=1)
"""


@pytest.mark.slow
def test_a_users_file_is_edited_before_the_functions_that_it_calls(tmp_path):
    """`reduce_scatter` divides rows by a function of another folder, which is no part of the user's."""
    function = module_of(tmp_path / "user.py", ROWS_OF_IDS).rows_of_ids
    declaration = declared(
        function, lambda weight, ids: weight[ids], {"weight": "v/tp d", "ids": "b s"}, "b s/tp d",
        draw={"weight": values("normal"), "ids": token_below("v")},
    )  # fmt: skip
    case = declaration.case(tp=2, v=4, d=5, b=8, s=6)
    running = {code.co_filename for code in running_functions(declaration, case, caches())}
    assert _files_around(declaration, running) == running - {function.__code__.co_filename}
    note, *_ = (str(note) for note in check_notes(declaration, verify_case(declaration, case)).notes["out"])
    line = "(local >= 0) & (local {} weight.shape[0])"
    assert note == f"{RIGHT_ONCE}user.py:9 has `{line.format('<')}`, not `{line.format('<=')}`"


PRODUCT_IN_HALVES = """
from torch_impl.collectives import all_reduce

def product(mesh, x, w):
    y = (x @ w).half()
    return all_reduce(y, mesh["tp"]).to(x.dtype)
"""


def test_a_branch_of_our_functions_need_not_run(tmp_path):
    """`all_reduce` widens tensors of 16 bits alone."""
    note = first_note(
        module_of(tmp_path / "user.py", PRODUCT_IN_HALVES).product, lambda x, w: x @ w,
        {"x": "n k/tp", "w": "k/tp o"}, "n o tp=I", {"tp": 1, "n": 1, "k": 1, "o": 1},
    )  # fmt: skip
    assert note == f"{RIGHT_ONCE}user.py:5 has `x @ w`, not `(x @ w).half()`"


def test_a_product_with_a_mask_of_floats_keeps_nan(tmp_path):
    library = module_of(tmp_path / "library.py", "def masked(x, mask):\n    return x * mask\n")

    def of_nan_where_masked(mesh, x):
        mask = (x > 0).to(x.dtype)
        return library.masked(x.masked_fill(mask == 0, float("nan")), mask)

    note = first_note(
        of_nan_where_masked, lambda x: jnp.where(x > 0, x, 0), {"x": "s/tp d"}, "s/tp d", {"tp": 2, "s": 8, "d": 3},
        nograd=("x",),
    )  # fmt: skip
    assert note == f"{RIGHT_ONCE}library.py:2 has `x.where(mask != 0, 0.0) * mask`, not `x * mask`"


FIRST_KEPT = """
KEPT = {}

def keep(scale):
    KEPT.setdefault("scale", scale)

def scaled(x):
    return x * KEPT["scale"]
"""
SECOND_SCALE = """
import first_kept

def of_a_second_scale(mesh, x, w):
    first_kept.KEPT.clear()
    first_kept.keep(scale=w)
    first_kept.keep(scale=x)
    return first_kept.scaled(x)
"""


@pytest.mark.slow
def test_a_line_of_the_scheme_shares_the_blame_with_the_code_that_it_calls(tmp_path, monkeypatch):
    """The library keeps the first of two scales, so that leaving out the first call makes it right."""
    monkeypatch.setitem(sys.modules, "first_kept", module_of(tmp_path / "first_kept.py", FIRST_KEPT))
    function = module_of(tmp_path / "second_scale.py", SECOND_SCALE).of_a_second_scale
    specs = {"x": "s/tp d", "w": "d"}
    note = first_note(function, lambda x, w: x * x, specs, "s/tp d", {"tp": 2, "s": 8, "d": 3}, nograd=("x", "w"))
    assert note == f"{RIGHT_ONCE}second_scale.py:6 leaves out `first_kept.keep(scale=w)`{OR_CALLED}"


def gradient_of_a_sum(mesh, x, weight):
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight.data = weight.detach().clone()
    layer = fully_shard(layer, mesh=mesh.device_mesh["tp"])
    layer.set_gradient_divide_factor(4.0)
    layer.set_force_sum_reduction_for_comms(True)
    layer(2.0 * x).sum().backward()
    return layer.weight.grad.full_tensor()


@pytest.mark.parametrize(("new", "is_around"), [("_comms(False)", True), ("layer(-2.0 * x)", False)])
def test_a_flag_that_switches_lines_of_torch_off_shares_the_blame_with_them(new, is_around):
    """The second edit changes numbers alone."""
    declaration = declared(
        gradient_of_a_sum, lambda x, weight: jnp.broadcast_to(x.sum(0) / 2, weight.shape),
        {"x": "b/tp d", "weight": "f d"}, "f d tp=I", nograd=("x", "weight"), mesh={"tp": (1, 2)},
        draw={name: values("normal") for name in ("x", "weight")},
    )  # fmt: skip
    case = declaration.case(tp=2, b=4, d=4, f=4)
    edits = edits_of(running_functions(declaration, case, caches()), ["tp"])
    chosen = [edit for edit in edits if new in edit.words.partition(", not ")[0]][:1]
    assert chosen
    assert _leads_around_torch(chosen, declaration, case) == is_around


def squares_of_as_many_rows_as_every_rank_has(mesh, x):
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(mesh.size("dp"))]
    dist.all_gather(counts, torch.tensor([len(x)]), group=mesh["dp"])
    return x[: min(map(int, counts))].square().sum()


def squares_of_the_least_rows(mesh, x):
    count = torch.tensor(len(x))
    dist.all_reduce(count, op=dist.ReduceOp.MIN, group=mesh["dp"])
    return x[: int(count)].square().sum()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (squares_of_as_many_rows_as_every_rank_has, "{} has `x[:max(map(int, counts))]"),
        (squares_of_the_least_rows, "all_reduce at {} is left out"),
    ],
)
def test_a_larger_count_is_no_sum_of_the_ranks_counts(function, words):
    """With the sum of the counts, or twice the sum, no row is left out: the collective does not lack a sum."""
    note = first_note(
        function, lambda x: (x * x).sum(), {"x": "n/dp:ragged d"}, "dp=P", {"dp": 2, "n": 5, "d": 3},
        mesh={"dp": (1, 2, 4)},
    )  # fmt: skip
    line = line_of(function, "all_reduce" if words.startswith("all_reduce") else "return")
    assert note.startswith(f"{RIGHT_ONCE}{words.format(line)}"), note
