"""Self-attention with rotary positions and shared KV heads, over tokens cut over cp and heads cut over tp."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from torch_impl.context_parallel import context_parallel_attention
from torch_impl.layouts import TokenLayout
from torch_impl.models.config import HybridConfig
from torch_impl.models.placement import Placement
from torch_impl.models.rotary import rotated


class Attention(nn.Module):
    """o_proj(attention(rotated(q_proj(x)), rotated(k_proj(x)), v_proj(x))), causal inside each document.

        x  "b s/cp:LAYOUT d"   ->   the same;   weights  "... cp=R", their heads cut over tp by a plan

    Cost: that of `context_parallel_attention`.
    """

    def __init__(self, config: HybridConfig, placement: Placement, **made: Any) -> None:
        super().__init__()
        self.config, self.placement = config, placement
        wide, narrow = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False, **made)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False, **made)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False, **made)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False, **made)

    def forward(self, x: Float[Tensor, "b s d"], layout: TokenLayout) -> Float[Tensor, "b s d"]:
        """See the class."""
        # b s h*p -> b h s p, of as many heads as this rank has
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        places, base = layout.position_ids[layout.local_index], self.config.rope_base
        mesh = self.placement.ring_and_heads
        mixed = context_parallel_attention(
            rotated(q, places, base),
            rotated(k, places, base),
            v,
            mesh=mesh,
            group=self.placement.cp if mesh is None else None,
            layout=layout,
            exchange=self.placement.exchange,
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))
