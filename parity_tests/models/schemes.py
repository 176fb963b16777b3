"""What the schemes of the hybrid model have in common: a model on a rank, and the same model whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.func import functional_call

from parity_tests.harness.declare.tree import flat
from parity_tests.models.parameters import config_of
from torch_impl.layouts import TokenLayout
from torch_impl.models import HybridConfig, HybridLM, Placement, tensor_parallel_plan

HEAD_DIM = 4
DTYPES = ("float32", "bfloat16", "float64")


def rank_logits(
    mesh: Any, ids: Tensor, layout: TokenLayout, parameters: dict[str, Any], groups: int, **chosen: Any
) -> Tensor:
    """Logits "b s/cp v/tp" of this rank's tokens, by a model whose parameters are these."""
    sizes = {"p": HEAD_DIM, "j": groups, "tp": mesh.size("tp")}
    config, tp = HybridConfig(**config_of(sizes, parameters)), mesh.device_mesh["tp"]
    leaves = flat(parameters)
    model = HybridLM(
        config, Placement(mesh["cp"], mesh["tp"], **chosen), device="meta", dtype=next(iter(leaves.values())).dtype
    )
    parallelize_module(model, tp, tensor_parallel_plan(config.layers), src_data_rank=None)
    cut = {name: x.placements for name, x in model.named_parameters() if isinstance(x, DTensor)}
    given = {n: DTensor.from_local(x, tp, cut[n], run_check=False) if n in cut else x for n, x in leaves.items()}
    if config.is_tied:
        given["lm_head.weight"] = given["embed_tokens.weight"]
    return functional_call(model, given, (ids, layout), strict=True)
