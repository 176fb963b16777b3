"""A hybrid language model: bytes to vectors, layers of attention and Mamba2, vectors to scores of the next byte.

Rank r of cp has its tokens of each stream, rank r of tp its heads, its columns of every MLP and its shard of the
vocabulary. On a group of one the same lines are the full model.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from torch_impl.layouts import TokenLayout
from torch_impl.models.batch import layout_of
from torch_impl.models.config import HybridConfig, Placement
from torch_impl.models.layers import layer_of
from torch_impl.models.loss import token_losses
from torch_impl.vocab_parallel.vocab_range import ceil_range


class HybridLM(nn.Module):
    """logits = lm_head(norm(layers(embed_tokens(ids)))), or with targets the loss of each token.

        ids, targets  "b s/cp:LAYOUT"   ->   "b s/cp:LAYOUT v"      with the plan of `tensor_parallel`  v/tp
                                        or   "b s/cp:LAYOUT tp=I"
        parameters  "... cp=R": replicated on each cp rank; their full gradient is the SUM over cp

    One row, b = 1, is a packed stream whose documents `layout` knows; several rows are a sequence each. In place of a
    layout the offsets of one stream's documents may be passed as a tensor, which a schedule splits as it splits ids.

    A stage of a pipeline has some of the modules: without the embedding it takes hidden states "b s/cp d" in place of
    ids, without the head it returns them.

    Cost:   that of its layers, and of `token_losses`; of offsets one copy to the host.
    Errors: those of attention, of the Mamba strategies and of `layout_of`.
    """

    def __init__(self, config: HybridConfig, placement: Placement, **factory: Any) -> None:
        super().__init__()
        self.config, self.placement = config, placement
        self.embed_tokens: nn.Embedding | None = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(layer_of(kind, config, placement, **factory) for kind in config.layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, **factory)
        self.lm_head: nn.Linear | None = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        if config.is_tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        ids: Shaped[Tensor, "b s *d"],
        layout: TokenLayout | Int[Tensor, "1 2 q"],
        targets: Int[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "b s *v"]:
        """See the class."""
        token_layout = layout if isinstance(layout, TokenLayout) else layout_of(layout, self.placement)
        x = ids if self.embed_tokens is None else self.embed_tokens(ids)
        for layer in self.layers.children():  # a list, or in a stage a dict by the layers' numbers
            x = layer(x, token_layout)
        # The norm goes with the head: a stage without them returns hidden states.
        if self.lm_head is None:
            return x
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else token_losses(logits, targets, self.placement.tp, self.config.vocab_size)

    def get_pipeline_stage_metas(
        self, is_first: bool, microbatch_size: int, seq_len: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and outputs of a stage on the meta device, for `_precompute_stage_shapes`.

            ids  "b s/cp"  where `is_first`, else hidden states  "b s/cp d"   ->   logits  "b s/cp v/tp" or hidden

        b is `microbatch_size`, `seq_len` counts this rank's tokens, floats have this `dtype` and a gradient.
        """
        # The ranks' shards of the vocabulary may be unequal: DTensor rounds up, so that the last ones are shorter.
        start, end = ceil_range(self.config.vocab_size, self.placement.tp.size(), self.placement.tp.rank())
        ids = torch.empty(microbatch_size, seq_len, dtype=torch.int64, device="meta")
        hidden, logits = (
            torch.empty(microbatch_size, seq_len, width, dtype=dtype, device="meta", requires_grad=True)
            for width in (self.config.hidden_size, end - start)
        )
        return [ids if is_first else hidden], [hidden if self.lm_head is None else logits]


Style = RowwiseParallel | ColwiseParallel | SequenceParallel
QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# By the kind of a layer. The stacks of experts are no linear layers: an axis ep of the mesh shards them, over tp too.
COLUMNS = {"attention": (*QUERY_KEY_VALUE, "mlp.gate_proj", "mlp.up_proj"), "moe": QUERY_KEY_VALUE}
ROWS = {"attention": ("self_attn.o_proj", "mlp.down_proj"), "moe": ("self_attn.o_proj",)}


def tensor_parallel_plan(layers: tuple[str, ...]) -> dict[str, Style]:
    """Module name -> style, for `parallelize_module` and the strategies of `parallelizer`.

        lm_head  "v/tp d"     logits  "b s v/tp": they stay sharded, for a vocabulary-parallel loss

    Heads, columns of the MLPs, and the vocabulary of embedding and head are sharded. Mamba2 layers and norms are
    replicated on every tp rank, which all compute the same. Each call returns new styles.

    Cost, over tp, each of x or its gradient: a layer of attention forward 2 all_reduces, of the outputs of o_proj and
    down_proj, backward 5, one for the input of each column-wise layer; the embedding forward 1; the head backward 1.
    """
    # Rows of the embedding are ids: each rank looks up those of its shard, and the sum over the ranks has all of them.
    plan: dict[str, Style] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(),
    }
    for index, kind in enumerate(layers):
        # Columns of the first product, rows of the second: between the two a rank needs no other rank.
        plan |= {f"layers.{index}.{name}": ColwiseParallel() for name in COLUMNS.get(kind, ())}
        plan |= {f"layers.{index}.{name}": RowwiseParallel() for name in ROWS.get(kind, ())}
    return plan
