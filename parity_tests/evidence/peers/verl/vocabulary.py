"""verl's functions of logits that are sharded by Megatron's tensor-parallel group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch._dynamo
from verl.utils.megatron import tensor_parallel

from parity_tests.evidence.peers.mathematics import token_losses
from parity_tests.evidence.peers.megatron_core.on_cpu import ISOLATED, initialize_model_parallel
from shardproof import ids, scheme, values


def initialize(mesh: Any) -> None:
    """Megatron's groups; and no compiler, which takes a minute for one product and sum."""
    torch._dynamo.config.disable = True
    initialize_model_parallel(mesh)


NORMAL = values("normal")
TP = dict(
    mesh={"tp": (1, 2, 4)},
    setup=initialize,
    isolate=(*ISOLATED, "verl.utils.megatron"),
    dtypes=("float32",),
    roundings=6,
    reduction=("v",),
    draw={"logits": NORMAL},
)


def entropy(logits: Any) -> Any:
    logprob = jax.nn.log_softmax(logits, -1)
    return -(jnp.exp(logprob) * logprob).sum(-1)


@scheme(reference=entropy, inputs={"logits": "n v/tp"}, outputs="n tp=I", **TP)
def entropy_of_a_copy(mesh: Any, logits: torch.Tensor) -> torch.Tensor:
    return tensor_parallel.vocab_parallel_entropy(logits * 1)


@scheme(reference=entropy, inputs={"logits": "b s v/tp"}, outputs="b s tp=I", **TP)
def entropy_of_a_copy_in_rows(mesh: Any, logits: torch.Tensor) -> torch.Tensor:
    return tensor_parallel.vocab_parallel_entropy(logits * 1)


@scheme(reference=entropy, inputs={"logits": "b s v/tp"}, outputs="b s tp=I", **TP)
def entropy_in_chunks(mesh: Any, logits: torch.Tensor) -> torch.Tensor:
    return tensor_parallel.vocab_parallel_entropy_with_chunking(logits * 1, 2)


@scheme(reference=entropy, inputs={"logits": "n v/tp"}, outputs="n tp=I", **TP)
def entropy_in_chunks_of_a_stream(mesh: Any, logits: torch.Tensor) -> torch.Tensor:
    """Logits of two dims, which its manual takes too."""
    return tensor_parallel.vocab_parallel_entropy_with_chunking(logits * 1, 2)


@scheme(reference=entropy, inputs={"logits": "n v/tp"}, outputs="n tp=I", **TP)
def entropy_of_its_input(mesh: Any, logits: torch.Tensor) -> torch.Tensor:
    return tensor_parallel.vocab_parallel_entropy(logits)


@scheme(
    reference=lambda logits: (jax.nn.softmax(logits, -1) ** 2).sum(-1),
    inputs={"logits": "n v/tp"},
    outputs="n tp=I",
    nograd=("logits",),
    **TP,
)
def sum_of_squares(mesh: Any, logits: torch.Tensor) -> torch.Tensor:
    return tensor_parallel.vocab_parallel_sum_pi_squared(logits)


@scheme(
    reference=lambda logits, target: -token_losses(logits, target),
    inputs={"logits": "n v/tp", "target": "n"},
    outputs="n tp=I",
    **{**TP, "draw": {"logits": NORMAL, "target": ids("v")}},
)
def log_probs_from_logits(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return tensor_parallel.vocab_parallel_log_probs_from_logits(logits * 1, target)
