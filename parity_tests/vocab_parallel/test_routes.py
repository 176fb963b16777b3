"""The manual's table of routes to a softmax and to a sampler's bounds agrees with the code."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_impl.vocab_parallel import fused_logprob, long_rows, sampling, statistics
from torch_impl.vocab_parallel.filter_bounds import Limits
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "vocab-parallel.md"
START = "| of | where | route |\n|---|---|---|\n"


class Taken(Exception):
    """A route was entered."""


def table():
    """(where, route) of each row."""
    rows = PAGE.read_text().partition(START)[2].partition("\n\n")[0].splitlines()
    return [tuple(cell.strip() for cell in row.split("|")[2:4]) for row in rows]


def number_in(row, route):
    """The number that the row of a route states, in its condition or, for a compiled gradient, in the route."""
    where, stated = table()[row]
    assert f"`{route}" in stated
    (number,) = re.findall(r"\d+", where + stated)
    return int(number)


@pytest.fixture
def entered(monkeypatch):
    """Which route a call enters, of functions that only say so."""

    def enters(name):
        def route(*args, **kwargs):
            raise Taken(name)

        return route

    monkeypatch.setattr(long_rows, "row_sums", enters("long_rows"))
    monkeypatch.setattr(statistics, "_eager_terms", enters("statistics"))
    monkeypatch.setattr(fused_logprob.kernels, "compiled", lambda f: enters("kernels.compiled"))
    monkeypatch.setattr(sampling, "topk_by_lists", enters("topk_by_lists"))
    monkeypatch.setattr(sampling, "topk_by_radix", enters("topk_by_radix"))

    def route_of(call):
        with pytest.raises(Taken) as caught:
            call()
        return str(caught.value)

    return route_of


def statistics_of(columns, backend="auto"):
    logits = torch.zeros(2, columns)
    return lambda: fused_logprob.row_statistics(logits, None, LogprobOptions(None, 0, columns, backend=backend))


def bounds_of(**limits):
    given = Limits(**{"top_k": None, "top_p": None, "min_p": None, **limits})
    column = torch.zeros(2, 1, dtype=torch.int32)
    return lambda: sampling.sampling_filter(torch.zeros(2, 8), column, LogprobOptions(None, 0, 8), given)


def test_the_table_has_six_routes():
    routes = [re.findall(r"`([\w.]+)`", route)[0] for _, route in table()]
    assert routes == [
        "kernels.softmax", "kernels.compiled", "long_rows", "statistics", "topk_by_lists", "topk_by_radix"
    ]  # fmt: skip


def test_long_rows_begin_where_the_table_says(entered):
    columns = number_in(2, "long_rows")
    assert columns == number_in(1, "kernels.compiled") == long_rows.MIN_COLUMNS
    assert entered(statistics_of(columns)) == "long_rows"
    assert entered(statistics_of(columns - 1)) == "statistics"


@pytest.mark.parametrize("columns", [8, long_rows.MIN_COLUMNS])
def test_a_compiled_backend_comes_first(entered, columns):
    assert entered(statistics_of(columns, "compile")) == "kernels.compiled"


def test_logits_on_cuda_go_to_triton_unless_another_backend_is_named(monkeypatch):
    monkeypatch.setattr(fused_logprob.kernels, "checked_backend", lambda *args: "triton")
    on_cuda, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    backends = {
        (backend, logits.is_cuda): fused_logprob.backend_of(LogprobOptions(None, backend=backend), logits)
        for backend in ("auto", "eager", "compile", "triton")
        for logits in (on_cuda, on_cpu)
    }
    triton = {key for key, backend in backends.items() if backend == "triton"}
    assert triton == {("auto", True), ("triton", True), ("triton", False)}


def test_lists_end_where_the_table_says(entered):
    longest = number_in(4, "topk_by_lists")
    assert longest == sampling.LONGEST_LIST
    for limits in ({"top_k": longest}, {"top_k": 1, "top_p": 0.5, "min_p": 0.1}):
        assert entered(bounds_of(**limits)) == "topk_by_lists"
    for limits in ({"top_k": longest + 1}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert entered(bounds_of(**limits)) == "topk_by_radix"
