"""DeepSpeed's sequence parallelism (Ulysses), the autograd functions of AutoTP, and its losses of sharded logits."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import deepspeed.comm
import torch
from deepspeed.module_inject.layers import (
    AsyncColumnParallel,
    ColumnParallel,
    GatherFromTensorParallelRegion,
    RowParallel,
    ScatterToTensorParallelRegion,
)
from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy, vocab_sequence_parallel_cross_entropy
from deepspeed.sequence.layer import DistributedAttention, _SeqAllToAll

from parity_tests.evidence.peers.mathematics import attention, identity, linear, mean_token_loss, token_losses
from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import ids, scheme, values

NORMAL = values("normal")


def initialize(mesh: Any) -> None:
    """The set-up at the start of a training script, once on each rank."""
    # A C++ extension for inference takes a minute to build. `deepspeed.comm.torch` by attribute is torch itself.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


DEEPSPEED = dict(setup=initialize, isolate=("deepspeed",), dtypes=("float32",))
ON_TP = dict(mesh={"tp": (1, 2, 4)}, **DEEPSPEED, **CONTIGUOUS)
ON_SP = dict(mesh={"sp": (1, 2, 4)}, **DEEPSPEED)
LINEAR = dict(reference=linear, draw={"x": NORMAL, "weight": NORMAL}, reduction=("b", "s", "i", "o"), **ON_TP)


# AutoTP
@scheme(inputs={"x": "b s i tp=I", "weight": "o/tp i"}, outputs="b s o/tp", **LINEAR)
def async_column_parallel(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return AsyncColumnParallel.apply(mesh["tp"], x, weight, None)


@scheme(inputs={"x": "b s i tp=I", "weight": "o/tp i"}, outputs="b s o/tp", **LINEAR)
def column_parallel(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ColumnParallel.apply(mesh["tp"], x) @ weight.T


@scheme(inputs={"x": "b s i/tp", "weight": "o i/tp"}, outputs="b s o tp=I", **LINEAR)
def row_parallel(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return RowParallel.apply(mesh["tp"], x @ weight.T, False)


@scheme(
    reference=lambda x, weight: x @ weight.swapaxes(-1, -2),
    inputs={"x": "b h s i/tp", "weight": "b h o i/tp"},
    outputs="b h s o tp=I",
    draw={"x": NORMAL, "weight": NORMAL},
    dims={"h": (2, 3), "s": (2, 3)},
    reduction=("i",),
    **ON_TP,
)
def row_parallel_of_transposed(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The products are laid out as [b, s, h, o], as attention's are: a view that is not contiguous."""
    products = (x @ weight.mT).transpose(1, 2).contiguous().transpose(1, 2)
    return RowParallel.apply(mesh["tp"], products, False)


@scheme(
    reference=lambda x: x.swapaxes(1, 2),
    inputs={"x": "b s d tp=I"},
    outputs="b d s tp=R",
    draw={"x": NORMAL},
    **ON_TP,
)
def column_parallel_of_transposed(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    """The input is used transposed after it, so its gradient comes back as a view that is not contiguous."""
    return ColumnParallel.apply(mesh["tp"], x).transpose(1, 2) * 1  # it sums into the gradient that comes in


@scheme(reference=identity, inputs={"x": "b s d/tp"}, outputs="b s d tp=I", draw={"x": NORMAL}, **ON_TP)
def gather_from_region(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return GatherFromTensorParallelRegion.apply(mesh["tp"], x, (x.shape[-1],) * mesh.size("tp"))


@scheme(reference=identity, inputs={"x": "b s d tp=I"}, outputs="b s d/tp", draw={"x": NORMAL}, **ON_TP)
def scatter_to_region(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    sizes = (x.shape[-1] // mesh.size("tp"),) * mesh.size("tp")
    return ScatterToTensorParallelRegion.apply(mesh["tp"], x, sizes, mesh.rank("tp"))


# Ulysses
@scheme(reference=identity, inputs={"x": "b s/sp h d"}, outputs="b s h/sp d", draw={"x": NORMAL}, **ON_SP)
def sequence_all_to_all(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return _SeqAllToAll.apply(mesh["sp"], x, 2, 1, 0)


@scheme(reference=identity, inputs={"x": "b s h/sp d"}, outputs="b s/sp h d", draw={"x": NORMAL}, **ON_SP)
def sequence_all_to_all_back(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return _SeqAllToAll.apply(mesh["sp"], x, 1, 2, 0)


def _local_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _declare_attention(name: str, kv_heads: str) -> None:
    def ulysses(mesh: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        layer = DistributedAttention(lambda q, k, v: _local_attention(q, k, v, causal), mesh["sp"])
        return layer(q, k, v, 0)

    ulysses.__name__ = name
    scheme(
        reference=attention,
        inputs={"q": "b s/sp h d", "k": f"b s/sp {kv_heads} d", "v": f"b s/sp {kv_heads} d"},
        outputs="b s/sp h d",
        options={"causal": (False, True)},
        dims={"h": (4, 8)} if kv_heads == "h" else {"h": "2*g", "g": (4, 8)},
        draw={each: NORMAL for each in ("q", "k", "v")},
        roundings=6,
        reduction=("s", "d"),
        **ON_SP,
    )(ulysses)


_declare_attention("distributed_attention", "h")
_declare_attention("distributed_attention_of_groups", "g")


# Losses
@scheme(
    reference=mean_token_loss,
    inputs={"logits": "s b v/tp", "target": "s b"},
    outputs="tp=I",
    draw={"logits": NORMAL, "target": ids("v")},
    roundings=4,
    reduction=("s", "b", "v"),
    **ON_TP,
)
def cross_entropy_mean(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return vocab_parallel_cross_entropy(logits, target, mesh["tp"])


@scheme(
    reference=lambda logits, target: token_losses(logits, target),
    inputs={"logits": "s b v/tp", "target": "s b"},
    outputs="s b tp=I",
    draw={"logits": NORMAL, "target": ids("v", ignore=-100)},
    roundings=4,
    reduction=("v",),
    **ON_TP,
)
def cross_entropy_of_tokens(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return vocab_parallel_cross_entropy(logits, target, mesh["tp"], reduction="none")


@scheme(
    reference=lambda logits, target: token_losses(logits, target),
    inputs={"logits": "s/sp b v/tp", "target": "s/sp b"},
    outputs="s b sp=R tp=I",
    mesh={"sp": (1, 2), "tp": (1, 2)},
    draw={"logits": NORMAL, "target": ids("v", ignore=-100)},
    roundings=4,
    reduction=("v",),
    **DEEPSPEED,
)
def cross_entropy_gathered_for_terms(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return vocab_parallel_cross_entropy(
        logits, target, mesh["tp"], mesh["sp"], reduction="none", gather_sequence_loss=True
    )


@scheme(
    reference=lambda logits, target: token_losses(logits, target),
    inputs={"logits": "s/sp b v/tp", "target": "s/sp b"},
    outputs="s b sp=I tp=I",
    mesh={"sp": (1, 2), "tp": (1, 2)},
    draw={"logits": NORMAL, "target": ids("v", ignore=-100)},
    roundings=4,
    reduction=("v",),
    **DEEPSPEED,
)
def cross_entropy_gathered_for_all(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return vocab_sequence_parallel_cross_entropy(logits, target, mesh["sp"], mesh["tp"])
