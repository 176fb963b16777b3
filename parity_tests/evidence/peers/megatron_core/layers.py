"""Megatron's layers with and without sequence parallelism, its cross entropy, and its embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from torch.func import functional_call

from parity_tests.evidence.peers.megatron_core.on_cpu import ISOLATED, config, initialize_model_parallel
from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import scheme, token_below, values

NORMAL = values("normal")
TP = {"tp": (1, 2, 4)}


MEGATRON = dict(mesh=TP, setup=initialize_model_parallel, isolate=ISOLATED, dtypes=("float32",), **CONTIGUOUS)
# With a frozen weight a linear layer is another function, which is a finding.
TRAINED = MEGATRON | {"excluded_conditions": (*CONTIGUOUS["excluded_conditions"], "frozen")}


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    return x @ weight.T + bias[None, None]


def _declare_linear(is_column: bool, has_sequence: bool, gathers: bool) -> None:
    rows = "s/tp b i" if has_sequence else "s b i tp=I"

    def linear(mesh: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        sizes = _whole_sizes(mesh, weight, is_column)
        kind = {"gather_output": gathers} if is_column else {"input_is_parallel": True}
        layer = (ColumnParallelLinear if is_column else RowParallelLinear)(
            *sizes,
            config=config(has_sequence),
            init_method=torch.nn.init.zeros_,
            bias=True,
            skip_bias_add=False,
            **kind,
        )
        return functional_call(layer, {"weight": weight, "bias": bias}, (x,))[0]

    suffix = "_sequence_parallel" if has_sequence else "_gathered" if gathers else ""
    linear.__name__ = ("column" if is_column else "row") + "_parallel_linear" + suffix
    if is_column:
        inputs = {"x": rows, "weight": "o/tp i", "bias": "o/tp"}
        outputs = "s b o tp=I" if gathers else "s b o/tp"
    else:
        inputs = {"x": "s b i/tp", "weight": "o i/tp", "bias": "o tp=R" if has_sequence else "o tp=I"}
        outputs = "s/tp b o" if has_sequence else "s b o tp=I"
    scheme(
        reference=_linear,
        inputs=inputs,
        outputs=outputs,
        draw={"x": NORMAL, "weight": NORMAL, "bias": NORMAL},
        reduction=("s", "b", "i", "o"),
        **TRAINED,
    )(linear)


def _whole_sizes(mesh: Any, weight: torch.Tensor, is_column: bool) -> tuple[int, int]:
    """The sizes of the whole layer that has this shard of a weight."""
    outs, ins = weight.shape
    return (ins, outs * mesh.size("tp")) if is_column else (ins * mesh.size("tp"), outs)


for _is_column in (True, False):
    for _has_sequence in (False, True):
        _declare_linear(_is_column, _has_sequence, gathers=False)
_declare_linear(True, False, gathers=True)


@scheme(
    reference=_linear,
    inputs={"x": "s b i tp=I", "weight": "o/tp i", "bias": "o/tp"},
    outputs="s b o/tp",
    nograd=("weight",),
    draw={"x": NORMAL, "weight": NORMAL, "bias": NORMAL},
    reduction=("s", "b", "i", "o"),
    **TRAINED,
)
def column_parallel_linear_of_a_frozen_weight(
    mesh: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    sizes = _whole_sizes(mesh, weight, is_column=True)
    layer = ColumnParallelLinear(
        *sizes, config=config(), init_method=torch.nn.init.zeros_, bias=True, skip_bias_add=False, gather_output=False
    )
    layer.weight.requires_grad_(False)
    return functional_call(layer, {"weight": weight, "bias": bias}, (x,))[0]


@scheme(
    reference=lambda ids, table: table[ids],
    inputs={"ids": "b s", "table": "v/tp d"},
    outputs="b s d tp=I",
    draw={"ids": token_below("v"), "table": NORMAL},
    reduction=("b", "s"),
    **MEGATRON,
)
def vocab_parallel_embedding(mesh: Any, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return _embedded(mesh, ids, table, scattered=False)


@scheme(
    reference=lambda ids, table: jnp.swapaxes(table[ids], 0, 1),
    inputs={"ids": "b s", "table": "v/tp d"},
    outputs="s/tp b d",
    draw={"ids": token_below("v"), "table": NORMAL},
    reduction=("b", "s"),
    **MEGATRON,
)
def vocab_parallel_embedding_scattered(mesh: Any, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return _embedded(mesh, ids, table, scattered=True)


def _embedded(mesh: Any, ids: torch.Tensor, table: torch.Tensor, scattered: bool) -> torch.Tensor:
    rows = table.shape[0] * mesh.size("tp")
    layer = VocabParallelEmbedding(
        rows, table.shape[1], init_method=torch.nn.init.zeros_, config=config(), reduce_scatter_embeddings=scattered
    )
    return functional_call(layer, {"weight": table}, (ids,))


# Cross entropy. It writes into the logits, so it gets a copy of them.
def cross_entropy(logits: Any, target: Any, smoothing: float) -> Any:
    logprobs = jax.nn.log_softmax(logits, -1)
    picked = jnp.take_along_axis(logprobs, target[..., None], -1)[..., 0]
    classes = logits.shape[-1]
    share = smoothing * classes / (classes - 1) if smoothing else 0.0
    return -(1.0 - share) * picked - share * logprobs.mean(-1)


def _declare_cross_entropy(name: str, smoothing: float, function: Callable[..., torch.Tensor]) -> None:
    def loss(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return function(logits.clone(), target)

    loss.__name__ = name
    scheme(
        reference=lambda logits, target: cross_entropy(logits, target, smoothing),
        inputs={"logits": "s b v/tp", "target": "s b"},
        outputs="s b tp=I",
        draw={"logits": NORMAL, "target": token_below("v")},
        dims={"v": (8, 12, 16)},
        reduction=("v",),
        roundings=4,
        **MEGATRON,
    )(loss)


def fused(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return fused_vocab_parallel_cross_entropy(logits, target, parallel_state.get_tensor_model_parallel_group())


_declare_cross_entropy("vocab_parallel_cross_entropy", 0.0, vocab_parallel_cross_entropy)
_declare_cross_entropy(
    "vocab_parallel_cross_entropy_smoothed", 0.1, partial(vocab_parallel_cross_entropy, label_smoothing=0.1)
)
_declare_cross_entropy("fused_vocab_parallel_cross_entropy", 0.0, fused)
