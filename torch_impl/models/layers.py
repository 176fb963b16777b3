"""The two kinds of layers: attention followed by an MLP, and Mamba2, each with a norm before it and a residual."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_impl.collectives import accumulator
from torch_impl.context_parallel import context_parallel_attention
from torch_impl.layouts import TokenLayout
from torch_impl.mamba import Mamba2Mixer, MambaContextParallel, MambaStatePassing
from torch_impl.models.config import HybridConfig, Placement


def rotated(x: Float[Tensor, "b h s p"], position_ids: Int[Tensor, " s"], base: float) -> Float[Tensor, "b h s p"]:
    """Columns i and i + p/2 rotated by `position * base ** (-2 i / p)`; positions count inside their document.

        x  "b h s/cp p"   position_ids  "s/cp"   ->   "b h s/cp p"

    Cost:   no collective. Angles in float64, since float32 loses whole turns of a distant position; the product in
            float32 or wider.
    Source: arXiv 2104.09864.
    """
    half = x.shape[-1] // 2
    column = torch.arange(half, device=x.device, dtype=torch.float64)
    angle = position_ids.to(torch.float64)[:, None] * base ** (-column / half)
    wide = accumulator(x.dtype)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    first, second = x.to(wide).split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """o_proj(attention(rotated(q_proj(x)), rotated(k_proj(x)), v_proj(x))), causal inside each document.

        x  "b s/cp:LAYOUT d"   ->   the same;   weights  "... cp=R", their heads sharded over tp by a plan

    Cost: that of `context_parallel_attention`.
    """

    def __init__(self, config: HybridConfig, placement: Placement, **factory: Any) -> None:
        super().__init__()
        self.config, self.placement = config, placement
        query_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        query_width, kv_width = query_heads * config.head_dim, kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False, **factory)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False, **factory)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False, **factory)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False, **factory)

    def forward(self, x: Float[Tensor, "b s d"], layout: TokenLayout) -> Float[Tensor, "b s d"]:
        """See the class."""
        # b s h*p -> b h s p, with the heads of this rank
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # A rank's tokens are not consecutive: their positions come from the layout.
        positions, base = layout.position_ids[layout.local_index], self.config.rope_base
        mesh = self.placement.ring_and_heads
        mixed = context_parallel_attention(
            rotated(q, positions, base),
            rotated(k, positions, base),
            v,
            mesh=mesh,
            group=self.placement.cp if mesh is None else None,
            layout=layout,
            exchange=self.placement.exchange,
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: HybridConfig, **factory: Any) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, inner, bias=False, **factory)
        self.up_proj = nn.Linear(d, inner, bias=False, **factory)
        self.down_proj = nn.Linear(inner, d, bias=False, **factory)

    def forward(self, x: Float[Tensor, "*a d"]) -> Float[Tensor, "*a d"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionLayer(nn.Module):
    """x + attention(norm(x)), then that + mlp(norm(that))."""

    def __init__(self, config: HybridConfig, placement: Placement, **factory: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **factory)
        self.self_attn = Attention(config, placement, **factory)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **factory)
        self.mlp = Mlp(config, **factory)

    def forward(self, x: Float[Tensor, "b s d"], layout: TokenLayout) -> Float[Tensor, "b s d"]:
        x = x + self.self_attn(self.input_layernorm(x), layout)
        return x + self.mlp(self.post_attention_layernorm(x))


class MambaLayer(nn.Module):
    """x + mamba(norm(x)); every tp rank computes all of it.

    Errors: ValueError for a layout that is not sharded in the placement's order, and for rows of several documents.
    """

    def __init__(self, config: HybridConfig, placement: Placement, **factory: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **factory)
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
            # A function, since the strategy needs the mixer, whose constructor calls it.
            context_parallel=lambda mixer: strategy(placement.cp, **sizes, mixer=mixer, layout=placement.order),
            **factory,
        )

    def forward(self, x: Float[Tensor, "b s d"], layout: TokenLayout) -> Float[Tensor, "b s d"]:
        _check_layout(layout, self.order, len(x))
        # Several rows are one sequence each; one row is a packed stream, whose documents the layout lists.
        cu_seqlens = layout.cu_padded if len(x) == 1 else None
        return x + self.mixer(self.input_layernorm(x), cu_seqlens)


def _check_layout(layout: TokenLayout, order: str, rows: int) -> None:
    # `packed` is DualChunkSwap of each document.
    kind = "dual_chunk_swap" if layout.kind == "packed" else layout.kind
    if layout.cp_size > 1 and kind != order:
        raise ValueError(
            f"models.MambaLayer: layout is sharded by {kind!r}, the model's Placement has order={order!r}; use one"
        )
    if rows > 1 and len(layout.cu_padded) > 2:
        raise ValueError(
            f"models.MambaLayer: x has {rows} rows and layout {len(layout.cu_padded) - 1} documents; pass one packed "
            "row, or rows of one sequence each"
        )


LAYERS = {"attention": AttentionLayer, "mamba": MambaLayer}


def layer_of(kind: str, config: HybridConfig, placement: Placement, **factory: Any) -> nn.Module:
    """A layer of one kind."""
    return LAYERS[kind](config, placement, **factory)
