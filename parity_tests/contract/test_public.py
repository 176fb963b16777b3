"""Each public function states a contract, so that a wrong argument is named before anything is sent."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch

from parity_tests.docstrings import HOMES, exported
from torch_impl.contract import contract_of
from torch_impl.layouts import contiguous, draw
from torch_impl.models import HybridLM, offsets_of, tensor_parallel_plan
from torch_impl.pipelining import write_csv

# Functions and constructors without a contract. The list may only become shorter.
WITHOUT = {
    "collectives.MeshView",  # of the harness's and the training run's own meshes
    "collectives.accumulator",  # called for each sum, inside functions with a contract
    "collectives.no_autocast",
    "context_parallel.fewest_bytes",  # passes everything on to attention_bytes, which states one
    "kernels.checked_backend",  # names the function that calls it
    "kernels.compiled",
    "layouts.indivisible",  # names the dim and the axis that it is called with
    "parallelizer.LoRALinear",  # made by add_lora, which states one
    "pipelining.functional.ParallelizeFnProtocol",  # a protocol, which nobody constructs
}
FOREIGN = ("torch_impl.contract",)  # states what a contract is


def without_contract(home: str) -> Iterator[str]:
    """The public functions and constructors of a package that take arguments and state no contract."""
    for name, of in exported(home).items():
        if name.startswith("_") or not (inspect.isroutine(of) or inspect.isclass(of)) or contract_of(of) is not None:
            continue
        if inspect.isclass(of) and (is_dataclass(of) or "__init__" not in vars(of) or issubclass(of, BaseException)):
            continue  # fields, or the constructor of a base
        if [argument for argument in inspect.signature(of).parameters if argument != "self"]:
            yield f"{home.removeprefix('torch_impl.')}.{name}"


def test_public_functions_without_a_contract():
    found = {name for home in HOMES if home not in FOREIGN for name in without_contract(home)}
    assert found == WITHOUT


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda path: draw(3, 8, 2), "layouts.draw: layout=3 is an int; pass a function"),
        (lambda path: draw(contiguous, 8, 0), "layouts.draw: world=0 must be at least 1"),
        (lambda path: offsets_of([]), "models.offsets_of: layouts is empty; pass one or more"),
        (lambda path: offsets_of([torch.ones(2)]), "models.offsets_of: layouts[0] is a Tensor; pass a TokenLayout"),
        (
            lambda path: tensor_parallel_plan("moe"),
            "models.tensor_parallel_plan: layers='moe' is a str; pass a list of names",
        ),
        (lambda path: HybridLM(None, None), "models.HybridLM: config is None; pass a HybridConfig"),
        (
            lambda path: write_csv(None, path),
            "pipelining.write_csv: order=None is None; pass a list of actions for each rank",
        ),
        (lambda path: write_csv([[3]], path), "pipelining.write_csv: order[0][0]=3 is an int; pass an Action, or None"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(call: Any, sentence: str, tmp_path: Any):
    kept = tmp_path / "kept.csv"
    kept.write_text("0F0\n")
    with pytest.raises((TypeError, ValueError)) as caught:
        call(kept)
    assert str(caught.value) == sentence and kept.read_text() == "0F0\n"
