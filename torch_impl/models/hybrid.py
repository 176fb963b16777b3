"""A hybrid language model: an embedding of bytes, layers of attention and Mamba2, and logits of the next byte.

A cp rank has its tokens of each stream; a tp rank has its heads, its columns of every MLP and its shard of the
vocabulary. With groups of one, the same code is the full model.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from torch_impl.contract import Instance, Names, contract
from torch_impl.layouts import TokenLayout
from torch_impl.models.batch import layout_of
from torch_impl.models.config import HybridConfig, Placement
from torch_impl.models.layers import layer_of
from torch_impl.models.loss import token_losses
from torch_impl.vocab_parallel.vocab_range import ceil_range

Config = Annotated[HybridConfig, Instance(HybridConfig, "pass a HybridConfig", shows_value=False)]
Placed = Annotated[Placement, Instance(Placement, "pass a Placement", shows_value=False)]


class HybridLM(nn.Module):
    """logits = lm_head(norm(layers(embed_tokens(ids)))), or with targets the loss of each token.

        ids, targets  "b s/cp:LAYOUT"   ->   "b s/cp:LAYOUT v"      with the plan of `tensor_parallel`  v/tp
                                        or   "b s/cp:LAYOUT tp=I"
        parameters  "... cp=R": replicated on each cp rank; their full gradient is the SUM over cp

    One row, b = 1, is a packed stream with the documents of `layout`; several rows are one sequence each. `layout` may
    also be a tensor, the offsets of one stream's documents, which a pipeline schedule can split like ids.

    A pipeline stage has some of the modules: without the embedding it takes hidden states "b s/cp d" in place of ids,
    and without the head it returns hidden states.

    Cost:   its layers and `token_losses`; offsets need one copy to the host.
    Errors: as `context_parallel_attention`, the Mamba strategies and `layout_of`; TypeError unless config is a
            HybridConfig and placement a Placement.
    """

    @contract
    def __init__(self, config: Config, placement: Placed, **factory: Any) -> None:
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
        for layer in self.layers.children():  # a list, or in a stage a dict by layer number
            x = layer(x, token_layout)
        # Norm and head are on the same stage; other stages return hidden states.
        if self.lm_head is None:
            return x
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else token_losses(logits, targets, self.placement.tp, self.config.vocab_size)

    def get_pipeline_stage_metas(
        self, is_first: bool, microbatch_size: int, seq_len: int, dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and outputs of a stage on the meta device, for `_precompute_stage_shapes`.

            ids  "b s/cp"  if `is_first`, else hidden states  "b s/cp d"   ->   logits  "b s/cp v/tp" or hidden

        b is `microbatch_size`, `seq_len` counts this rank's tokens; hidden states and logits have this `dtype` and
        require grad.
        """
        # Shards of the vocabulary may be unequal: DTensor rounds up, so the last ranks have fewer ids.
        start, end = ceil_range(self.config.vocab_size, self.placement.tp.size(), self.placement.tp.rank())
        ids = torch.empty(microbatch_size, seq_len, dtype=torch.int64, device="meta")
        hidden, logits = (
            torch.empty(microbatch_size, seq_len, width, dtype=dtype, device="meta", requires_grad=True)
            for width in (self.config.hidden_size, end - start)
        )
        return [ids if is_first else hidden], [hidden if self.lm_head is None else logits]


Style = RowwiseParallel | ColwiseParallel | SequenceParallel
QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# By kind of layer. Stacks of experts are not linear layers: `shard_experts` shards them, over the axes ep and tp.
COLUMNS = {"attention": (*QUERY_KEY_VALUE, "mlp.gate_proj", "mlp.up_proj"), "moe": QUERY_KEY_VALUE}
ROWS = {"attention": ("self_attn.o_proj", "mlp.down_proj"), "moe": ("self_attn.o_proj",)}


@contract
def tensor_parallel_plan(layers: Names) -> dict[str, Style]:
    """Module name -> style, for `parallelize_module` and the strategies of `parallelizer`.

        lm_head  "v/tp d"     logits  "b s v/tp": they stay sharded, for a vocabulary-parallel loss

    Heads, columns of the MLPs, and the vocabulary of embedding and head are sharded. Mamba2 layers and norms are
    replicated: every tp rank computes the same. Each call returns new styles.

    Cost, over tp, each all_reduce of x or its gradient: an attention layer forward 2 (outputs of o_proj and down_proj),
    backward 5 (the input of each column-wise layer); the embedding forward 1; the head backward 1.
    Errors: TypeError unless layers is a list of names.
    """
    # Rows of the embedding are ids: each rank looks up the ids of its shard, and the sum over ranks has all rows.
    plan: dict[str, Style] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(),
    }
    for index, kind in enumerate(layers):
        # Columns of the first product, then rows of the second: no communication is needed between the two.
        plan |= {f"layers.{index}.{name}": ColwiseParallel() for name in COLUMNS.get(kind, ())}
        plan |= {f"layers.{index}.{name}": RowwiseParallel() for name in ROWS.get(kind, ())}
    return plan
