"""The layers of the model: attention with an MLP or a mixture of experts, and Mamba2, with norms and residuals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_impl.collectives import accumulator
from torch_impl.context_parallel import context_parallel_attention
from torch_impl.contract import Rejected, Sharded, ShardedInt, contract
from torch_impl.expert_parallel import sequence_balance_loss, softmax_top_k, with_loss, z_loss
from torch_impl.expert_parallel.dispatch import sorted_choices
from torch_impl.expert_parallel.experts import checked_weights
from torch_impl.layouts import TokenLayout
from torch_impl.mamba import Mamba2Mixer, MambaContextParallel, MambaStatePassing
from torch_impl.models.config import HybridConfig, Placement


def rotated(x: Float[Tensor, "b h s p"], position_ids: Int[Tensor, " s"], base: float) -> Float[Tensor, "b h s p"]:
    """Rotary embedding: rotate columns i and i + p/2 by the angle `position * base ** (-2 i / p)`.

        x  "b h s/cp p"   position_ids  "s/cp"   ->   "b h s/cp p"

    Positions count from the start of each document. Angles are computed in float64, since float32 loses entire turns at
    distant positions; the rotation runs in float32 or wider.

    Cost:   no collective.
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

        x  "b s/cp:LAYOUT d"   ->   the same;   weights  "... cp=R", with heads sharded over tp by a plan

    Cost: as `context_parallel_attention`.
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
        # b s h*p -> b h s p, with this rank's heads
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # A rank's tokens are not consecutive, so their positions come from the layout.
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

    def __init__(self, config: HybridConfig, placement: Placement, **factory: Any) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, inner, bias=False, **factory)
        self.up_proj = nn.Linear(d, inner, bias=False, **factory)
        self.down_proj = nn.Linear(inner, d, bias=False, **factory)

    def forward(self, x: Float[Tensor, "*a d"], layout: TokenLayout | None = None) -> Float[Tensor, "*a d"]:
        """See the class; `layout` is not read, since each token is mapped by itself."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """The gated sum of the experts' outputs for each token; weights and arguments as in transformers.

        hidden_states "t d", top_k_index and top_k_weights "t k"   ->   "t d"
        gate_up_proj "e 2f d", gate rows before up rows; down_proj "e d f"

    All experts are on this rank; `fsdp2_strategy_parallelize` shards them over a mesh axis `ep`.
    """

    def __init__(self, config: HybridConfig, **factory: Any) -> None:
        super().__init__()
        e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d, **factory))
        self.down_proj = nn.Parameter(torch.empty(e, d, f, **factory))
        self.act_fn = nn.SiLU()
        for stack in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(stack, std=stack.shape[-1] ** -0.5)

    @contract
    def forward(
        self,
        hidden_states: Sharded[Tensor, "t d"],
        top_k_index: ShardedInt[Tensor, "t k"],
        top_k_weights: Sharded[Tensor, "t k"],
    ) -> Sharded[Tensor, "t d"]:
        gate_up, down = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        weights = checked_weights(hidden_states, gate_up, down, "auto")
        choices = sorted_choices(top_k_index, len(down))
        choices = choices.first(int(choices.counts.sum()))  # drop padding ids (-1)
        return weights.sums(hidden_states, top_k_weights, choices, hidden_states.dtype)


class Moe(nn.Module):
    """A mixture of experts: gates are the k largest of softmax(router(x)), divided by their sum.

        x  "b s/cp d"   ->   the same

    From `begin_step` to `end_step` the router's losses are added to the step's loss (`with_loss`): the balance loss and
    the z-loss of each sequence, times their coefficients, as a mean over all sequences of the step. Padding of the
    layout has no expert: its output is 0, and no loss counts it. Without a layout every row is a token.

    Cost:   in a step forward 1 all_reduce of b * (e + 1) int64 over cp.
    """

    def __init__(self, config: HybridConfig, placement: Placement, **factory: Any) -> None:
        super().__init__()
        self.config, self.placement = config, placement
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False, **factory)
        self.experts = Experts(config, **factory)
        self.loss_scale: float | None = None  # factor of a sequence's losses; None outside a step
        self.shares: list[Tensor] = []

    def begin_step(self, shards: int, averaged_over: int) -> None:
        """Add the router's losses from now on.

        `shards` is the number of micro-batches on all ranks, cp ranks included, with one sequence each; `averaged_over`
        is the number of ranks that gradients are averaged over, as in `normalised`.
        """
        self.loss_scale = averaged_over * self.placement.cp.size() / shards
        self.shares = []

    def end_step(self) -> list[Tensor]:
        """Stop adding losses; returns this rank's shares of them, one per micro-batch that has run backward."""
        self.loss_scale = None
        return self.shares

    def forward(self, x: Float[Tensor, "b s d"], layout: TokenLayout | None = None) -> Float[Tensor, "b s d"]:
        """See the class."""
        logits = self.router(x.flatten(0, 1))
        gates, experts, probabilities = softmax_top_k(logits, self.config.num_experts_per_tok, norm_topk_prob=True)
        if layout is not None:
            is_padding = layout.padding_mask[layout.local_index].repeat(len(x))
            experts = experts.masked_fill(is_padding[:, None], -1)
        y = self.experts(x.flatten(0, 1), experts, gates).view(x.shape)
        if self.loss_scale is None:
            return y
        # 1. The losses of each sequence; the other cp ranks have the rest of its tokens.
        cp, rows = self.placement.cp, x.shape[:2]
        tokens = rows[1] * cp.size() if layout is None else layout.cu_real[-1]
        balance = sequence_balance_loss(probabilities.unflatten(0, rows), experts.unflatten(0, rows), cp).sum()
        z = z_loss(logits, tokens, experts)
        loss = self.loss_scale * (self.config.balance_coefficient * balance + self.config.z_coefficient * z)
        # 2. Record the loss once per backward; a recomputed forward (activation checkpointing) adds nothing.
        if loss.requires_grad:
            value = loss.detach()
            loss.register_hook(lambda _: self.shares.append(value))
        return with_loss(y, loss)


class AttentionLayer(nn.Module):
    """y = x + attention(norm(x)), then y + mlp(norm(y))."""

    def __init__(
        self, config: HybridConfig, placement: Placement, mlp: Callable[..., nn.Module] = Mlp, **factory: Any
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **factory)
        self.self_attn = Attention(config, placement, **factory)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **factory)
        self.mlp = mlp(config, placement, **factory)

    def forward(self, x: Float[Tensor, "b s d"], layout: TokenLayout) -> Float[Tensor, "b s d"]:
        x = x + self.self_attn(self.input_layernorm(x), layout)
        return x + self.mlp(self.post_attention_layernorm(x), layout)


class MambaLayer(nn.Module):
    """x + mamba(norm(x)); every tp rank computes the full layer.

    Errors: ValueError for a layout in another order than the placement's, and for several rows with several documents.
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
            # A function that the mixer's constructor calls, since the strategy needs the mixer.
            context_parallel=lambda mixer: strategy(placement.cp, **sizes, mixer=mixer, layout=placement.order),
            **factory,
        )

    @contract
    def forward(self, x: Sharded[Tensor, "b s d"], layout: TokenLayout) -> Float[Tensor, "b s d"]:
        weight = self.input_layernorm.weight
        if x.shape[-1] != len(weight) or x.device != weight.device:
            raise Rejected(f"x is {list(x.shape)} on {x.device}; pass [b, s, {len(weight)}] on {weight.device}")
        _check_layout(layout, self.order, len(x))
        # Several rows are one sequence each; one row is a packed stream with the layout's documents.
        cu_seqlens = layout.cu_padded if len(x) == 1 else None
        return x + self.mixer(self.input_layernorm(x), cu_seqlens)


def _check_layout(layout: TokenLayout, order: str, rows: int) -> None:
    # `packed` is DualChunkSwap inside each document.
    kind = "dual_chunk_swap" if layout.kind == "packed" else layout.kind
    if layout.cp_size > 1 and kind != order:
        raise Rejected(f"layout is sharded by {kind!r}, the model's Placement has order={order!r}; use one")
    if rows > 1 and len(layout.cu_padded) > 2:
        raise Rejected(
            f"x has {rows} rows and layout {len(layout.cu_padded) - 1} documents; pass one packed "
            "row, or rows of one sequence each"
        )


LAYERS = {"attention": AttentionLayer, "mamba": MambaLayer, "moe": partial(AttentionLayer, mlp=Moe)}


def layer_of(kind: str, config: HybridConfig, placement: Placement, **factory: Any) -> nn.Module:
    """A layer of this kind."""
    return LAYERS[kind](config, placement, **factory)
