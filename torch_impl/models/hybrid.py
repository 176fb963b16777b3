"""A hybrid language model: bytes to vectors, layers of attention and Mamba2, vectors to scores of the next byte.

Rank r of cp holds its tokens of each stream, rank r of tp its heads, its columns of every MLP and its share of the
vocabulary. On a group of one the same lines are the whole model.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_impl.layouts import TokenLayout
from torch_impl.models.config import HybridConfig
from torch_impl.models.layer import layer_of
from torch_impl.models.loss import token_losses
from torch_impl.models.placement import Placement


class HybridLM(nn.Module):
    """logits = lm_head(norm(layers(embed_tokens(ids)))), or with targets the loss of each token.

        ids, targets  "b s/cp:LAYOUT"   ->   "b s/cp:LAYOUT v"      with the plan of `tensor_parallel`  v/tp
                                        or   "b s/cp:LAYOUT tp=I"
        parameters  "... cp=R": whole on each cp rank; their full gradient is the SUM over cp

    One row, b = 1, is a packed stream whose documents `layout` knows; several rows are a sequence each.

    Cost:   that of its layers, and of `token_losses`.
    Errors: those of attention and of the Mamba strategies.
    """

    def __init__(self, config: HybridConfig, placement: Placement, **made: Any) -> None:
        super().__init__()
        self.config, self.placement = config, placement
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **made)
        self.layers = nn.ModuleList(layer_of(kind, config, placement, **made) for kind in config.layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **made)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **made)
        if config.is_tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, ids: Int[Tensor, "b s"], layout: TokenLayout, targets: Int[Tensor, "b s"] | None = None
    ) -> Float[Tensor, "b s *v"]:
        """See the class."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, layout)
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else token_losses(logits, targets, self.placement.tp, self.config.vocab_size)
