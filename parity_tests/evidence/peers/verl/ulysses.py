"""verl's Ulysses: functions that exchange heads and sequence, that slice the sequence, and that gather the slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.utils import ulysses

from parity_tests.evidence.peers.mathematics import identity
from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import scheme, values

# verl keeps the sequence-parallel group in its module, so on lockstep each rank needs its globals for itself.
SP = dict(mesh={"sp": (1, 2, 4)}, dtypes=("float32",), isolate=("verl.utils.ulysses",))
Call = Callable[[Any, torch.Tensor], torch.Tensor]


def with_group(call: Call) -> Call:
    """The call after a training script has set the group, as verl's workers do."""

    def called(mesh: Any, x: torch.Tensor) -> torch.Tensor:
        ulysses.set_ulysses_sequence_parallel_group(mesh["sp"])
        return call(mesh, x)

    return called


def without_group(call: Call) -> Call:
    """The call where no group is set, whatever another scheme has left."""

    def called(mesh: Any, x: torch.Tensor) -> torch.Tensor:
        ulysses.set_ulysses_sequence_parallel_group(None)
        return call(mesh, x)

    return called


# For each function its call, and the specs of its input and its output.
FUNCTIONS: dict[str, tuple[Call, str, str]] = {
    "gather_seq_scatter_heads": (
        lambda mesh, x: ulysses.gather_seq_scatter_heads(x, 1, 2, group=mesh["sp"]),
        "b s/sp h d",
        "b s h/sp d",
    ),
    "gather_heads_scatter_seq": (
        lambda mesh, x: ulysses.gather_heads_scatter_seq(x, 2, 1, group=mesh["sp"]),
        "b s h/sp d",
        "b s/sp h d",
    ),
    "gather_seq_scatter_heads_of_the_group_that_is_set": (
        with_group(lambda mesh, x: ulysses.gather_seq_scatter_heads(x, 1, 2)),
        "b s/sp h d",
        "b s h/sp d",
    ),
    "gather_heads_scatter_seq_of_the_group_that_is_set": (
        with_group(lambda mesh, x: ulysses.gather_heads_scatter_seq(x, 2, 1)),
        "b s h/sp d",
        "b s/sp h d",
    ),
    "there_and_back": (
        lambda mesh, x: ulysses.gather_heads_scatter_seq(
            ulysses.gather_seq_scatter_heads(x, 1, 2, group=mesh["sp"]), 2, 1, group=mesh["sp"]
        ),
        "b s/sp h d",
        "b s/sp h d",
    ),
    "all_to_all_of_rows": (
        lambda mesh, x: ulysses.SeqAllToAll.apply(mesh["sp"], x, 3, 0),
        "b/sp s h d",
        "b s h d/sp",
    ),
    "gather_outputs": (
        lambda mesh, x: ulysses.gather_outputs_and_unpad(x, 1, grad_scaler=False, group=mesh["sp"]),
        "b s/sp h d",
        "b s h d sp=I",
    ),
    "gather_outputs_along_the_first_dim": (
        lambda mesh, x: ulysses.gather_outputs_and_unpad(x, 0, grad_scaler=False, group=mesh["sp"]),
        "b/sp s h d",
        "b s h d sp=I",
    ),
    "slice_input": (
        with_group(lambda mesh, x: ulysses.slice_input_tensor(x, 1)),
        "b s h d sp=R",
        "b s/sp h d",
    ),
    "slice_input_along_the_last_dim": (
        with_group(lambda mesh, x: ulysses.slice_input_tensor(x, -1)),
        "b s h d sp=R",
        "b s h d/sp",
    ),
    "slice_input_of_a_given_group": (
        without_group(lambda mesh, x: ulysses.slice_input_tensor(x, 1, group=mesh["sp"])),
        "b s h d sp=R",
        "b s/sp h d",
    ),
    "slice_input_and_gather_outputs": (
        with_group(
            lambda mesh, x: ulysses.gather_outputs_and_unpad(ulysses.slice_input_tensor(x, 1), 1, grad_scaler=False)
        ),
        "b s h d sp=R",
        "b s h d sp=I",
    ),
}


def _declare(name: str) -> None:
    call, input_spec, output_spec = FUNCTIONS[name]

    def function(mesh: Any, x: torch.Tensor) -> torch.Tensor:
        return call(mesh, x)

    function.__name__ = name
    scheme(
        reference=identity,
        inputs={"x": input_spec},
        outputs=output_spec,
        dims={"s": (4, 8), "h": (4, 8)},  # 2 and 4 ranks divide these sizes, as the exchanges need
        draw={"x": values("normal")},
        **SP,
        **CONTIGUOUS,
    )(function)


for _name in FUNCTIONS:
    _declare(_name)
