"""fairscale.nn.model_parallel: mappings, layers and cross entropy, which take their group from a module global."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairscale.nn.model_parallel import initialize as state
from fairscale.nn.model_parallel import mappings
from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
from fairscale.nn.model_parallel.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch.func import functional_call

from parity_tests.evidence.peers.mathematics import identity, token_losses
from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import scheme, token_below, values

NORMAL = values("normal")


def initialize(mesh: Any) -> None:
    """The set-up at the start of a training script, once on each rank."""
    state.destroy_model_parallel()
    state.initialize_model_parallel(mesh.size("tp"))


FAIRSCALE = dict(
    mesh={"tp": (1, 2, 4)},
    setup=initialize,
    isolate=("fairscale.nn.model_parallel",),
    dtypes=("float32",),
    **CONTIGUOUS,
)

MAPPINGS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str]] = {
    "copy_to_model_parallel_region": (mappings.copy_to_model_parallel_region, "s b d tp=I", "s b d tp=R"),
    "reduce_from_model_parallel_region": (
        lambda x: mappings.reduce_from_model_parallel_region(x.clone()),
        "s b d tp=P",
        "s b d tp=I",
    ),
    "scatter_to_model_parallel_region": (mappings.scatter_to_model_parallel_region, "s b d tp=I", "s b d/tp"),
    "gather_from_model_parallel_region": (mappings.gather_from_model_parallel_region, "s b d/tp", "s b d tp=I"),
}


def _declare(name: str) -> None:
    call, entered, left = MAPPINGS[name]

    def mapping(mesh: Any, x: torch.Tensor) -> torch.Tensor:
        return call(x) * 1  # the sum is in place, so the gradient that comes in is one of its own

    mapping.__name__ = name
    scheme(reference=identity, inputs={"x": entered}, outputs=left, draw={"x": NORMAL}, **FAIRSCALE)(mapping)


for _name in MAPPINGS:
    _declare(_name)

LINEAR = dict(
    reference=lambda x, weight, bias: x @ weight.T + bias[None, None],
    draw={"x": NORMAL, "weight": NORMAL, "bias": NORMAL},
    reduction=("s", "b", "i", "o"),
    **FAIRSCALE,
)


@scheme(inputs={"x": "s b i tp=I", "weight": "o/tp i", "bias": "o/tp"}, outputs="s b o/tp", **LINEAR)
def column_parallel_linear(mesh: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    layer = ColumnParallelLinear(
        weight.shape[1], weight.shape[0] * mesh.size("tp"), gather_output=False, init_method=torch.nn.init.zeros_
    )
    return functional_call(layer, {"weight": weight, "bias": bias}, (x,))


@scheme(inputs={"x": "s b i tp=I", "weight": "o/tp i", "bias": "o/tp"}, outputs="s b o tp=I", **LINEAR)
def column_parallel_linear_gathered(
    mesh: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    layer = ColumnParallelLinear(weight.shape[1], weight.shape[0] * mesh.size("tp"), init_method=torch.nn.init.zeros_)
    return functional_call(layer, {"weight": weight, "bias": bias}, (x,))


@scheme(inputs={"x": "s b i/tp", "weight": "o i/tp", "bias": "o tp=I"}, outputs="s b o tp=I", **LINEAR)
def row_parallel_linear(mesh: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    layer = RowParallelLinear(
        weight.shape[1] * mesh.size("tp"), weight.shape[0], input_is_parallel=True, init_method=torch.nn.init.zeros_
    )
    return functional_call(layer, {"weight": weight, "bias": bias}, (x,))


EMBEDDING = dict(
    reference=lambda ids, table: table[ids],
    outputs="b s d tp=I",
    draw={"ids": token_below("v"), "table": NORMAL},
    reduction=("b", "s"),
    **FAIRSCALE,
)


@scheme(inputs={"ids": "b s", "table": "v/tp d"}, **EMBEDDING)
def vocab_parallel_embedding(mesh: Any, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    layer = VocabParallelEmbedding(table.shape[0] * mesh.size("tp"), table.shape[1], init_method=torch.nn.init.zeros_)
    return functional_call(layer, {"weight": table}, (ids,))


@scheme(inputs={"ids": "b s", "table": "v d/tp"}, **EMBEDDING)
def parallel_embedding(mesh: Any, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    layer = ParallelEmbedding(table.shape[0], table.shape[1] * mesh.size("tp"), init_method=torch.nn.init.zeros_)
    return functional_call(layer, {"weight": table}, (ids,))


@scheme(
    reference=token_losses,
    inputs={"logits": "s b v/tp", "target": "s b"},
    outputs="s b tp=I",
    draw={"logits": NORMAL, "target": token_below("v")},
    roundings=4,
    reduction=("v",),
    **FAIRSCALE,
)
def cross_entropy(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A copy of the logits: it writes into them."""
    return vocab_parallel_cross_entropy(logits.clone(), target)
