"""The functions of megatron.core.tensor_parallel.mappings, each with the group as its argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings

from parity_tests.evidence.peers.megatron_core.on_cpu import allocate_on_cpu
from parity_tests.evidence.peers.strides import CONTIGUOUS, transposed
from shardproof import scheme, values

# For each mapping: its call, and the specs of its input and its output. x is [s, b, d], as Megatron's activations are.
RegionFunction = Callable[[torch.Tensor, Any], torch.Tensor]
MAPPINGS: dict[str, tuple[RegionFunction, str, str]] = {
    "copy_to_tensor_model_parallel_region": (mappings.copy_to_tensor_model_parallel_region, "s b d tp=I", "s b d tp=R"),
    "reduce_from_tensor_model_parallel_region": (
        lambda x, group: mappings.reduce_from_tensor_model_parallel_region(x.clone(), group),
        "s b d tp=P",
        "s b d tp=I",
    ),
    "scatter_to_tensor_model_parallel_region": (
        mappings.scatter_to_tensor_model_parallel_region,
        "s b d tp=I",
        "s b d/tp",
    ),
    "gather_from_tensor_model_parallel_region": (
        mappings.gather_from_tensor_model_parallel_region,
        "s b d/tp",
        "s b d tp=I",
    ),
    "scatter_to_sequence_parallel_region": (mappings.scatter_to_sequence_parallel_region, "s b d tp=I", "s/tp b d"),
    "gather_from_sequence_parallel_region": (
        lambda x, group: mappings.gather_from_sequence_parallel_region(x, group=group),
        "s/tp b d",
        "s b d tp=R",
    ),
    "gather_from_sequence_parallel_region_for_all": (
        lambda x, group: mappings.gather_from_sequence_parallel_region(x, False, group),
        "s/tp b d",
        "s b d tp=I",
    ),
    "reduce_scatter_to_sequence_parallel_region": (
        lambda x, group: mappings.reduce_scatter_to_sequence_parallel_region(x, group),
        "s b d tp=P",
        "s/tp b d",
    ),
    "all_gather_last_dim_from_tensor_parallel_region": (
        mappings.all_gather_last_dim_from_tensor_parallel_region,
        "s b d/tp",
        "s b d tp=R",
    ),
    "reduce_scatter_last_dim_to_tensor_parallel_region": (
        mappings.reduce_scatter_last_dim_to_tensor_parallel_region,
        "s b d tp=P",
        "s b d/tp",
    ),
}


SUMS = ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region")  # of contiguous tensors


def _declare(name: str) -> None:
    call, entered, left = MAPPINGS[name]

    def mapping(mesh: Any, x: torch.Tensor) -> torch.Tensor:
        return call(x, mesh["tp"]) * 1  # Megatron sums in place, so the gradient that comes in is one of its own

    mapping.__name__ = name
    scheme(
        reference=lambda x: x,
        mesh={"tp": (1, 2, 4)},
        inputs={"x": entered},
        outputs=left,
        draw={"x": values("normal", "ties")},
        setup=allocate_on_cpu,
        **(CONTIGUOUS if name in SUMS else {}),
    )(mapping)


for _name in MAPPINGS:
    _declare(_name)


# The two sums of tensors that are not contiguous: a gradient, and an input.
@scheme(
    reference=lambda x: x.swapaxes(1, 2),
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "s b d tp=I"},
    outputs="s d b tp=R",
    draw={"x": values("normal")},
    setup=allocate_on_cpu,
    **CONTIGUOUS,
)
def copy_used_transposed(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mappings.copy_to_tensor_model_parallel_region(x, mesh["tp"]).mT * 1


@scheme(
    reference=lambda x: x,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "s b d tp=P"},
    outputs="s b d tp=I",
    draw={"x": values("normal")},
    setup=allocate_on_cpu,
    **CONTIGUOUS,
)
def reduce_of_transposed(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mappings.reduce_from_tensor_model_parallel_region(transposed(x), mesh["tp"])


# Exchanges of rows: [tokens / tp, hidden] to [tokens, hidden / tp] and back.
@scheme(
    reference=lambda x: x,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "n/tp h"},
    outputs="n h/tp",
    draw={"x": values("normal")},
    setup=allocate_on_cpu,
)
def all_to_all_sp2hp(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mappings.all_to_all_sp2hp(x, mesh["tp"])


@scheme(
    reference=lambda x: x,
    mesh={"tp": (1, 2, 4)},
    inputs={"x": "n h/tp"},
    outputs="n/tp h",
    draw={"x": values("normal")},
    setup=allocate_on_cpu,
)
def all_to_all_hp2sp(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return mappings.all_to_all_hp2sp(x, mesh["tp"])


@scheme(
    reference=lambda x: x,
    mesh={"ep": (1, 2, 4)},
    inputs={"x": "n/ep h"},
    outputs="n/ep h",
    draw={"x": values("normal")},
    setup=allocate_on_cpu,
)
def all_to_all_there_and_back(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    """With uneven counts: each rank sends all its rows to the next rank, which sends them back."""
    ranks, rank = mesh.size("ep"), mesh.rank("ep")
    to_next = [x.shape[0] if other == (rank + 1) % ranks else 0 for other in range(ranks)]
    from_last = [x.shape[0] if other == (rank - 1) % ranks else 0 for other in range(ranks)]
    moved = mappings.all_to_all(mesh["ep"], x, from_last, to_next)
    return mappings.all_to_all(mesh["ep"], moved, to_next, from_last)
