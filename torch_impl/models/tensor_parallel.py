"""Which weights tp cuts: heads, columns of the MLPs, and the vocabulary of embedding and head.

Mamba2 layers and norms stay whole on every tp rank, which all compute the same.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

Style = RowwiseParallel | ColwiseParallel | SequenceParallel
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def tensor_parallel_plan(layers: tuple[str, ...]) -> dict[str, Style]:
    """Module name -> style, for `parallelize_module` and the strategies of `parallelizer`.

        lm_head  "v/tp d"     logits  "b s v/tp": they stay cut, for a vocabulary-parallel loss

    Each call makes fresh styles.

    Cost, over tp, each of x or its gradient: a layer of attention forward 2 all_reduces, of what o_proj and down_proj
    give, backward 5, one for the input of each layer of columns; the embedding forward 1; the head backward 1.
    """
    plan: dict[str, Style] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(),
    }
    for index, kind in enumerate(layers):
        if kind == "attention":
            plan |= {f"layers.{index}.{name}": ColwiseParallel() for name in COLUMNS}
            plan |= {f"layers.{index}.{name}": RowwiseParallel() for name in ROWS}
    return plan
