"""The two kinds of layers: attention with an MLP after it, and Mamba2. Each is between residuals, after a norm."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from torch_impl.layouts import TokenLayout
from torch_impl.mamba import Mamba2Mixer, MambaContextParallel, MambaStatePassing
from torch_impl.models.attention import Attention
from torch_impl.models.config import HybridConfig
from torch_impl.models.placement import Placement


class Mlp(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: HybridConfig, **made: Any) -> None:
        super().__init__()
        d, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, wide, bias=False, **made)
        self.up_proj = nn.Linear(d, wide, bias=False, **made)
        self.down_proj = nn.Linear(wide, d, bias=False, **made)

    def forward(self, x: Float[Tensor, "*a d"]) -> Float[Tensor, "*a d"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionLayer(nn.Module):
    """x + attention(norm(x)), then that + mlp(norm(that))."""

    def __init__(self, config: HybridConfig, placement: Placement, **made: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **made)
        self.self_attn = Attention(config, placement, **made)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **made)
        self.mlp = Mlp(config, **made)

    def forward(self, x: Float[Tensor, "b s d"], layout: TokenLayout) -> Float[Tensor, "b s d"]:
        x = x + self.self_attn(self.input_layernorm(x), layout)
        return x + self.mlp(self.post_attention_layernorm(x))


class MambaLayer(nn.Module):
    """x + mamba(norm(x)); every tp rank does the whole of it.

    Errors: ValueError for a layout that is not cut in the placement's order, and for rows of several documents.
    """

    def __init__(self, config: HybridConfig, placement: Placement, **made: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **made)
        sizes = {
            "num_heads": config.mamba_heads,
            "head_dim": config.mamba_head_dim,
            "n_groups": config.mamba_groups,
            "d_state": config.state_size,
        }
        self.order = placement.order
        strategy = {"hidden": MambaContextParallel, "state": MambaStatePassing}[placement.mamba]
        self.mixer = Mamba2Mixer(
            config.hidden_size,
            **sizes,
            d_conv=config.conv_width,
            chunk_size=config.chunk_size,
            norm_eps=config.norm_eps,
            context_parallel=lambda mixer: strategy(placement.cp, **sizes, mixer=mixer, layout=placement.order),
            **made,
        )

    def forward(self, x: Float[Tensor, "b s d"], layout: TokenLayout) -> Float[Tensor, "b s d"]:
        _check_layout(layout, self.order, len(x))
        # Rows of one length are one sequence each; one row is a stream, whose documents stand in the layout.
        cu_seqlens = layout.cu_padded if len(x) == 1 else None
        return x + self.mixer(self.input_layernorm(x), cu_seqlens)


def _check_layout(layout: TokenLayout, order: str, rows: int) -> None:
    cut = "dual_chunk_swap" if layout.kind == "packed" else layout.kind
    if layout.cp_size > 1 and cut != order:
        raise ValueError(
            f"models.MambaLayer: layout is cut by {cut!r}, the model's Placement has order={order!r}; make them alike"
        )
    if rows > 1 and len(layout.cu_padded) > 2:
        raise ValueError(
            f"models.MambaLayer: x has {rows} rows and layout {len(layout.cu_padded) - 1} documents; pass one packed "
            "row, or rows of one sequence each"
        )


LAYERS = {"attention": AttentionLayer, "mamba": MambaLayer}


def layer_of(kind: str, config: HybridConfig, placement: Placement, **made: Any) -> nn.Module:
    """A layer of one kind."""
    return LAYERS[kind](config, placement, **made)
