"""Small models of six families under the tensor plan that each brings along: logits, and every gradient.

The weights are functions of their names; the reference is the decoder in JAX that the parallelizer's tests use.
Gradients are accumulated over micro-batches, as a training step leaves them in .grad, and joined to one vector.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from jax_ref.parallelizer.reference import DecoderTraits, step
from parity_tests.parallelizer.families import Chosen, arrays, empty
from shardproof import integers, scheme

SIZES = (
    ("hidden_size", 16),
    ("intermediate_size", 32),
    ("num_hidden_layers", 1),
    ("num_attention_heads", 4),
    ("num_key_value_heads", 4),
    ("head_dim", 4),
    ("vocab_size", 32),
)


def _chosen(family: str, tied: bool, **changes: Any) -> Chosen:
    return Chosen(family, tied, tuple((dict(SIZES) | changes).items()))


def _model(chosen: Chosen, mesh: Any) -> torch.nn.Module:
    model = empty(chosen, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(arrays(chosen)[name]))
    if mesh.size("tp") > 1:  # as from_pretrained does, which loads weights from a disk besides
        if chosen.tied:  # there the two are tied once they are sharded
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size("tp")))
        model = apply_tensor_parallelism(model, mesh.device_mesh, plan)
        model.tie_weights()
    return model


def _declare(
    name: str, chosen: Chosen, micro_batches: tuple[int, ...] = (1,), ranks: tuple[int, ...] = (1, 2, 4)
) -> None:
    traits = DecoderTraits.of(chosen.config)
    names = sorted(arrays(chosen))
    count = sum(arrays(chosen)[each].size for each in names)

    def reference(ids: Any, micro_batches: int) -> Any:
        weights = {each: jnp.asarray(arrays(chosen)[each]) for each in names}
        targets = jnp.roll(ids, -1, 1)
        result = step(traits, weights, ids, targets)
        gradient = jnp.concatenate([result.gradients[each].reshape(-1) for each in names])
        return result.logits, micro_batches * gradient

    def plan(mesh: Any, ids: torch.Tensor, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = _model(chosen, mesh)
        targets = ids.roll(-1, 1)
        for _ in range(micro_batches):
            logits = model(ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        by_name = {each: parameter.grad for each, parameter in model.named_parameters()}
        full_gradients = [g.full_tensor() if isinstance(g := by_name[each], DTensor) else g for each in names]
        return logits.detach(), torch.cat([gradient.reshape(-1) for gradient in full_gradients])

    plan.__name__ = name
    scheme(
        reference=reference,
        mesh={"tp": ranks},
        inputs={"ids": "b s"},
        outputs=("b s v tp=I", "n tp=I"),
        dims={"n": (count,), "v": (32,), "b": (2,), "s": (5,)},
        draw={"ids": integers(0, 31)},
        options={"micro_batches": micro_batches},
        dtypes=("float32",),
        roundings=40,
        replicas="budget",
        random=True,
    )(plan)


for _family in ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3"):
    _declare(f"{_family}_plan", _chosen(_family, False))
    _declare(f"{_family}_accumulated", _chosen(_family, False), (2, 3))
for _family in ("llama", "qwen2", "qwen3", "gemma"):
    _declare(f"{_family}_tied", _chosen(_family, True))
    _declare(f"{_family}_of_groups", _chosen(_family, False, num_key_value_heads=2), ranks=(1, 2))
_declare("llama_with_fewer_kv_heads_than_ranks", _chosen("llama", False, num_key_value_heads=2), ranks=(4,))
