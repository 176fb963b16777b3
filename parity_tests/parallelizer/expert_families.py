"""Mixtures of experts of transformers, small and random, trained for a step in one process and on the ranks of a mesh.

The step is three micro-batches, whose rows do not depend on the mesh, clipping and AdamW. The loss is that of the
language model, and of the router the z-loss and, where transformers computes one, the balance loss, both over all
tokens of a micro-batch. Alone, everything is transformers' and torch's own; on a mesh, it is ours. No JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from parity_tests.parallelizer.families import IGNORED, Chosen, Float64Throughout, batch, model_of
from parity_tests.parallelizer.training import (
    ADAMW,
    Step,
    full_arrays,
    parallelized,
    summed_loss,
)
from torch_impl.collectives.mesh import MeshView
from torch_impl.expert_parallel import global_balance_loss, softmax_top_k, z_loss
from torch_impl.optimizers import Muon, clip_grad_norm_, parameter_kinds
from torch_impl.parallelizer.mesh_axes import mesh_axes

K = 2
# No dim of an expert is as large as another, and no number of experts is a width.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 10, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 10},
    "gpt_oss": {},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 10,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 5,
        "kv_lora_rank": 6,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 3,
        "num_mtp_layers": 0,
    },
}
# Muon takes gate and up as two matrices, one above the other; those of gpt-oss alternate.
OF_MUON = [family for family in OF_FAMILY if family != "gpt_oss"]
BALANCE_LOSSES: dict[str, Callable[..., Any]] = {  # transformers' own; DeepSeek-V3 balances by a bias and has none
    "qwen3_moe": modeling_qwen3_moe.load_balancing_loss_func,
    "mixtral": modeling_mixtral.load_balancing_loss_func,
    "gpt_oss": modeling_gpt_oss.load_balancing_loss_func,
}
ROWS, LENGTH, MICROBATCHES = 12, 5, 3
BALANCE, Z = 0.5, 0.25  # large, so that a wrong gradient of either shows
MUON: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.1}
MAX_NORM = 0.5  # below every norm here, so that gradients are scaled


def chosen(family: str) -> Chosen:
    return Chosen(family, changes=(*OF_FAMILY[family].items(), ("num_experts_per_tok", K)))


def mixture(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """The model; in float64 without one number of float32 inside. Its bias of the choice is not zero."""
    model = model_of(chosen(family), dtype)
    model.set_experts_implementation("eager")  # the others have no float64
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-1, 2, buffer.numel()).sin() / 4)
    return model


Optimizer = Callable[[nn.Module], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAMW, foreach=False)


@dataclass(frozen=True)
class Together:
    """Optimizers of different parameters, stepped as one."""

    parts: Sequence[torch.optim.Optimizer]

    def step(self) -> None:
        for part in self.parts:
            part.step()


def muon(model: nn.Module) -> Together:
    """Muon for all matrices, gate and up separately; AdamW for the rest."""
    kinds = parameter_kinds(model)
    fused = [p for name, p in kinds.matrices.items() if name.endswith("gate_up_proj")]
    height = fused[0].shape[-2] // 2
    single = [p for p in kinds.matrices.values() if all(p is not other for other in fused)]
    others = [*kinds.embeddings.values(), *kinds.vectors.values()]
    groups = [{"params": single}, {"params": fused, "rows": (height, height)}]
    return Together([Muon(groups, **MUON), torch.optim.AdamW(others, **ADAMW, foreach=False)])


@cache
def alone(family: str, length: int = LENGTH) -> Step:
    """The step of the unsharded model."""
    losses = lambda logits: _router_losses_alone(logits, family)  # noqa: E731
    return _step(mixture(family), family, slice(None), 1, losses, adamw, length)


def on_rank(view: MeshView, family: str, optimizer: Optimizer = adamw, length: int = LENGTH, **switches: Any) -> Step:
    """The step on this rank, with its own rows of every micro-batch."""
    axes = mesh_axes(view.device_mesh)
    model = parallelized(**switches)(mixture(family), view.device_mesh)
    rows, data = slice(axes.loss_mesh.get_local_rank(), None, axes.data_size), axes.loss_mesh.get_group()
    losses = lambda logits: _router_losses(logits, family, data)  # noqa: E731
    return _step(model, family, rows, axes.data_size, losses, optimizer, length)


def _step(
    model: Any,
    family: str,
    rows: slice,
    ranks: int,
    router_losses: Callable[..., Tensor],
    optimizer: Optimizer,
    length: int,
) -> Step:
    ids, targets = batch(chosen(family), ROWS, length)
    tokens, total, stepped = int((targets != IGNORED).sum()), 0.0, optimizer(model)
    for number, (x, y) in enumerate(_microbatches(ids, targets)):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number == MICROBATCHES - 1)
        outputs = model(input_ids=x[rows], output_router_logits=True)
        loss = summed_loss(outputs.logits, y[rows]) / tokens + router_losses(outputs.router_logits) / MICROBATCHES
        (ranks * loss).backward()
        total += loss.item()
    gradients = full_arrays(model, gradients=True)
    clip = torch.nn.utils.clip_grad_norm_ if ranks == 1 and not _is_sharded(model) else clip_grad_norm_
    norm = clip(list(model.parameters()), MAX_NORM)
    clipped = full_arrays(model, gradients=True)
    stepped.step()
    return Step(total, norm.item(), gradients, clipped, full_arrays(model))


def _is_sharded(model: Any) -> bool:
    return hasattr(model, "set_requires_gradient_sync")


def _microbatches(ids: np.ndarray, targets: np.ndarray) -> Iterable[tuple[Tensor, Tensor]]:
    both = (torch.from_numpy(array).chunk(MICROBATCHES) for array in (ids, targets))
    return zip(*both, strict=True)


def _router_losses_alone(logits: Sequence[Tensor], family: str) -> Tensor:
    """Of all layers together, as transformers has it: counts and probabilities are summed over them."""
    with Float64Throughout():
        of_choice = BALANCE_LOSSES.get(family, lambda *_: 0.0)
        balance = of_choice(tuple(logits), logits[0].shape[-1], K)
        return BALANCE * balance + Z * torch.cat(list(logits)).logsumexp(-1).square().mean()


def _router_losses(logits: Sequence[Tensor], family: str, data: ProcessGroup) -> Tensor:
    """This rank's addend of the same; transformers' balance loss is k where ours is 1."""
    together = torch.cat(list(logits))
    z = Z * z_loss(together, len(together) * data.size())
    if family not in BALANCE_LOSSES:
        return z
    _, experts, probabilities = softmax_top_k(together, K)
    return BALANCE * K * global_balance_loss(probabilities, experts, data) + z
