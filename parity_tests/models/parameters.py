"""The parameters of a hybrid model of two or four layers as a scheme draws them, and a rank's model that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.func import functional_call

from shardproof import values
from shardproof.declare.declared import flat, nested
from torch_impl.layouts import TokenLayout
from torch_impl.models import HybridConfig, HybridLM, Placement, tensor_parallel_plan

# How tp shards each parameter, by the plan; an unsharded parameter has the same gradient on each tp rank.
ATTENTION = {
    "input_layernorm.weight": "d tp=I",
    "self_attn.q_proj.weight": "w/tp d",
    "self_attn.k_proj.weight": "x/tp d",
    "self_attn.v_proj.weight": "x/tp d",
    "self_attn.o_proj.weight": "d w/tp",
    "post_attention_layernorm.weight": "d tp=I",
    "mlp.gate_proj.weight": "f/tp d",
    "mlp.up_proj.weight": "f/tp d",
    "mlp.down_proj.weight": "d f/tp",
}
MAMBA = {
    "input_layernorm.weight": "d tp=I",
    "mixer.in_proj.weight": "u d tp=I",
    "mixer.conv1d.weight": "c 1 k tp=I",
    "mixer.conv1d.bias": "c tp=I",
    "mixer.dt_bias": "r tp=I",
    "mixer.A_log": "r tp=I",
    "mixer.D": "r tp=I",
    "mixer.norm.weight": "i tp=I",
    "mixer.out_proj.weight": "d i tp=I",
}
TIED = {
    "embed_tokens.weight": "v/tp d",
    **{f"layers.0.{name}": spec for name, spec in ATTENTION.items()},
    **{f"layers.1.{name}": spec for name, spec in MAMBA.items()},
    "norm.weight": "d tp=I",
}
UNTIED = {**TIED, "lm_head.weight": "v/tp d"}
# Twice the two layers, so that two ranks can have two stages each.
FOUR_TIED = {
    **TIED,
    **{f"layers.2.{name}": spec for name, spec in ATTENTION.items()},
    **{f"layers.3.{name}": spec for name, spec in MAMBA.items()},
}
# h query heads of p columns share g KV heads; r Mamba heads of e columns, j groups, n states.
RELATED = {"w": "h*p", "x": "g*p", "i": "r*e", "c": "r*e+2*j*n", "u": "2*r*e+2*j*n+r"}
SIZES = {"v": (12,), "d": (4,), "p": (4,), "f": (6,), "e": (2,), "n": (2,), "k": (4,)}
# Stored in the dtype and used again: about a dozen in each layer, the embedding, the last norm and the head.
ROUNDINGS = 27


def specs(parameters: Mapping[str, str], summed: str) -> dict[str, Any]:
    """The tree of specs; `summed` types the axes over which gradients add up, as `cp=R`."""
    return nested({name: f"{spec} {summed}" for name, spec in parameters.items()})


def drawn(parameters: Mapping[str, str]) -> dict[str, Any]:
    return {f"parameters.{name}": values("normal") for name in parameters}


def config_of(case: Mapping[str, int], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of both sides' configs, from full parameters' shapes and the sizes that no shape tells."""
    leaves = flat(parameters)
    head_dim, groups, heads = case["p"], case["j"], leaves["layers.1.mixer.dt_bias"].shape[0]
    inner = leaves["layers.1.mixer.norm.weight"].shape[0]
    channels, _, width = leaves["layers.1.mixer.conv1d.weight"].shape
    tp = case["tp"]
    return {
        "vocab_size": leaves["embed_tokens.weight"].shape[0] * tp,
        "hidden_size": leaves["norm.weight"].shape[0],
        "layers": ("attention", "mamba") * (2 if "layers.2.input_layernorm.weight" in leaves else 1),
        "num_attention_heads": leaves["layers.0.self_attn.q_proj.weight"].shape[0] * tp // head_dim,
        "num_key_value_heads": leaves["layers.0.self_attn.k_proj.weight"].shape[0] * tp // head_dim,
        "head_dim": head_dim,
        "intermediate_size": leaves["layers.0.mlp.up_proj.weight"].shape[0] * tp,
        "mamba_heads": heads,
        "mamba_head_dim": inner // heads,
        "mamba_groups": groups,
        "state_size": (channels - inner) // (2 * groups),
        "conv_width": width,
        "chunk_size": 4,
        "rope_base": 100.0,
        "norm_eps": 1e-5,
        "is_tied": "lm_head.weight" not in leaves,
    }


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
    tensors = {n: DTensor.from_local(x, tp, cut[n], run_check=False) if n in cut else x for n, x in leaves.items()}
    if config.is_tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    return functional_call(model, tensors, (ids, layout), strict=True)
