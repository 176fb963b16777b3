"""A net of one block with routed and shared experts, small enough to be drawn; its experts are a module of stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parity_tests.parallelizer.styled import Stacks, linear_layer
from torch_impl.expert_parallel import global_balance_loss, softmax_top_k, z_loss
from torch_impl.parallelizer import translate_to_torch_parallel_style

BALANCE, Z = 0.5, 0.25  # large, so that a wrong gradient of either shows
PLAN = {"blocks.*.mixture.shared_up": "colwise", "blocks.*.mixture.shared_down": "rowwise"}


class Mixture(nn.Module):
    """The outputs of routed and shared experts for tokens [b, s, d], and the router's logits, [b s, e]."""

    def __init__(self, router: Tensor, experts: tuple[Tensor, Tensor], shared: tuple[Tensor, Tensor], k: int) -> None:
        super().__init__()
        self.router, self.experts, self.k = linear_layer(router), Stacks(*experts), k
        self.shared_up, self.shared_down = map(linear_layer, shared)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        gates, chosen, _ = softmax_top_k(logits, self.k, norm_topk_prob=True)
        routed = self.experts(tokens, chosen, gates.double())  # gates may be wider than the hidden states
        return routed.view_as(x) + self.shared_down(F.silu(self.shared_up(x))), logits


class Block(nn.Module):
    """Tokens plus the output of a mixture of experts, and the logits of its router."""

    def __init__(self, *mixture: Any) -> None:
        super().__init__()
        self.mixture = Mixture(*mixture)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, logits = self.mixture(x)
        return x + y, logits


class ExpertNet(nn.Module):
    """A list of one block, and a head."""

    def __init__(self, values: Mapping[str, Tensor], k: int) -> None:
        super().__init__()
        mixture = {name.removeprefix("blocks.0.mixture."): value for name, value in values.items()}
        experts = mixture["experts.gate_up_proj"], mixture["experts.down_proj"]
        shared = mixture["shared_up.weight"], mixture["shared_down.weight"]
        self.blocks = nn.ModuleList([Block(mixture["router.weight"], experts, shared, k)])
        self.head = linear_layer(values["head.weight"])
        self.k = k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, logits = self.blocks[0](x)
        return self.head(y), logits

    def loss(self, x: Tensor, tokens: int, data: ProcessGroup) -> Tensor:
        """This rank's addend: the mean square of all outputs, and both losses of the router; x is its tokens [t, d]."""
        y, logits = self(x[None])
        _, experts, probabilities = softmax_top_k(logits, self.k)
        router_losses = BALANCE * global_balance_loss(probabilities, experts, data) + Z * z_loss(logits, tokens)
        return y.square().sum() / (tokens * y.shape[-1]) + router_losses


def plan() -> dict[str, Any]:
    return {key: translate_to_torch_parallel_style(name) for key, name in PLAN.items()}
