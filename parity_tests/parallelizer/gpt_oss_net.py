"""A net of one block with the experts of gpt-oss, small enough to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from parity_tests.parallelizer.styled import linear_layer
from torch_impl.expert_parallel import top_k_softmax
from torch_impl.parallelizer import translate_to_torch_parallel_style

STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def experts_of(values: Mapping[str, Tensor], limit: float) -> nn.Module:
    """The module of transformers with these values."""
    size, inner, width = values["down_proj"].shape
    config = GptOssConfig(hidden_size=width, intermediate_size=inner, num_local_experts=size, swiglu_limit=limit)
    with torch.device("meta"):
        experts = GptOssExperts(config)
    for name in STACKS:
        setattr(experts, name, nn.Parameter(values[name].clone()))
    return experts


class Block(nn.Module):
    """Tokens [t, d] plus the output of their experts, whose arguments are given by name."""

    def __init__(self, router: nn.Linear, experts: nn.Module, k: int) -> None:
        super().__init__()
        self.router, self.experts, self.k = router, experts, k

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen, _ = top_k_softmax(self.router(x), self.k)
        return x + self.experts(x, routing_weights=gates, router_indices=chosen)


class GptOssNet(nn.Module):
    """A list of one block, and a head."""

    def __init__(self, values: Mapping[str, Tensor], k: int, limit: float) -> None:
        super().__init__()
        of_experts = {name: values[f"blocks.0.experts.{name}"] for name in STACKS}
        router = linear_layer(values["blocks.0.router.weight"], values["blocks.0.router.bias"])
        self.blocks = nn.ModuleList([Block(router, experts_of(of_experts, limit), k)])
        self.head = linear_layer(values["head.weight"])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


def plan() -> dict[str, Any]:
    return {"head": translate_to_torch_parallel_style("colwise_gather_output")}
