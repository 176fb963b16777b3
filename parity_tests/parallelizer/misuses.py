"""Plans that must be rejected, each with words that name the mistake; on models without values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parity_tests.parallelizer.families import Chosen, empty
from torch_impl.parallelizer import get_hf_tp_shard_plan, translate_to_torch_parallel_style
from torch_impl.parallelizer.tp_plan import check_plan

QWEN3 = Chosen("qwen3")
TIED = Chosen("llama", tied=True)
NORM_OF_HEADS = Chosen("cohere", changes=(("use_qk_norm", True), ("num_key_value_heads", 4)))
FIVE_KV_HEADS = Chosen("llama", changes=(("hidden_size", 20), ("num_attention_heads", 20), ("num_key_value_heads", 5)))


@dataclass(frozen=True)
class Misuse:
    """`make` gives the plan for a model; `message` is the start of the rejection, `{tp}` in it the number of ranks."""

    message: str
    make: Callable[[Any], Any]
    model: Chosen = QWEN3
    error: type[Exception] = ValueError
    changes: dict[str, Any] = field(default_factory=dict)


def named(**styles: str) -> Callable[[Any], Any]:
    """A plan of names; `__` is the dot and `all` the star of a key."""

    def make(model: Any) -> dict[str, Any]:
        keys = {name.replace("__", ".").replace("all", "*"): style for name, style in styles.items()}
        return {key: translate_to_torch_parallel_style(style) for key, style in keys.items()}

    return make


MISUSES = {
    "a misspelt part": Misuse(
        "tp_shard_plan: key 'model.layers.*.attn.q_proj' matches no module of Qwen3ForCausalLM; "
        "nearest: 'model.layers.*.self_attn.q_proj'",
        named(model__layers__all__attn__q_proj="colwise"),
    ),
    "a key of the inner model": Misuse(
        "tp_shard_plan: key 'layers.*.mlp.up_proj' matches no module of Qwen3ForCausalLM; "
        "nearest: 'model.layers.*.mlp.up_proj'",
        named(layers__all__mlp__up_proj="colwise"),
    ),
    "a parameter": Misuse(
        "tp_shard_plan: key 'lm_head.weight' matches no module of Qwen3ForCausalLM; nearest: 'lm_head'",
        named(lm_head__weight="colwise"),
    ),
    "a name for a style": Misuse(
        "parallelizer.check_plan: plan['lm_head'] is 'colwise', not a ParallelStyle; "
        "translate_to_torch_parallel_style makes one of a name",
        lambda model: {"lm_head": "colwise"},
        error=TypeError,
    ),
    "a number for a key": Misuse(
        "parallelizer.check_plan: plan has the key 3, an int; keys are names of modules",
        lambda model: {3: translate_to_torch_parallel_style("colwise")},
        error=TypeError,
    ),
    "a list": Misuse("parallelizer.check_plan: plan is a list; pass a dict", lambda model: [], error=TypeError),
    "no plan": Misuse("tp_shard_plan: has no entry for tp={tp}", lambda model: None),
    "an empty plan": Misuse("tp_shard_plan: has no entry for tp={tp}", lambda model: {}),
    "heads that do not divide": Misuse(
        "tp_shard_plan: key 'model.layers.*.self_attn.k_proj' shards heads, and num_key_value_heads=5 does not divide "
        "by tp={tp}",
        get_hf_tp_shard_plan,
        FIVE_KV_HEADS,
    ),
    "queries cut and values whole": Misuse(
        "tp_shard_plan: key 'model.layers.*.self_attn.q_proj' shards heads, and its sibling "
        "'model.layers.0.self_attn.v_proj' is not in the plan, so that heads of different ranks would meet; give it "
        "the same style",
        lambda model: {key: style for key, style in get_hf_tp_shard_plan(model).items() if "v_proj" not in key},
        Chosen("llama", changes=(("num_key_value_heads", 4),)),
    ),
    "a norm of all heads behind a part of them": Misuse(
        "tp_shard_plan: 'model.layers.0.self_attn.q_norm' has weights for all 16 features of the heads, and key "
        "'model.layers.*.self_attn.q_proj' leaves each rank a part of them; use colwise_gather_output",
        get_hf_tp_shard_plan,
        NORM_OF_HEADS,
    ),
    "a tie cut in two ways": Misuse(
        "tp_shard_plan: 'model.embed_tokens.weight' is S(1) and 'lm_head.weight' is S(0), but they share one parameter",
        named(model__embed_tokens="embedding_colwise", lm_head="colwise_gather_output"),
        TIED,
    ),
    "half of a tie": Misuse(
        "tp_shard_plan: 'model.embed_tokens.weight' is not in the plan and 'lm_head.weight' is S(0), but they share",
        named(lm_head="colwise_gather_output"),
        TIED,
    ),
    "two keys for a module": Misuse(
        "tp_shard_plan: keys 'model.layers.*.mlp.up_proj' and 'model.layers.1.mlp.up_proj' both match "
        "'model.layers.1.mlp.up_proj'; keep one",
        named(model__layers__all__mlp__up_proj="colwise", model__layers__1__mlp__up_proj="colwise"),
    ),
    "a norm cut by columns": Misuse(
        "tp_shard_plan: key 'model.norm': ColwiseParallel shards Linear and Embedding, not Qwen3RMSNorm",
        named(model__norm="colwise"),
    ),
    "a norm of two halves": Misuse(
        "tp_shard_plan: key 'model.norm': packed_colwise: shards the halves of a Linear, not a Qwen3RMSNorm",
        named(model__norm="packed_colwise"),
    ),
    "halves of an odd width": Misuse(
        "tp_shard_plan: key 'lm_head': packed_colwise: out_features=31 has no two equal halves",
        named(lm_head="packed_colwise"),
    ),
    "stacks without entries": Misuse(
        "tp_shard_plan: key 'model.norm': moe_tp_experts: parameter 'weight' has no entry in Qwen3RMSNorm",
        named(model__norm="moe_tp_experts"),
    ),
    "halves under FSDP": Misuse(
        "tp_shard_plan: 'model.layers.0.mlp.up_proj.weight' is packed and FSDP would shard it over 2 ranks",
        named(model__layers__all__mlp__up_proj="packed_colwise"),
        changes={"fsdp_size": 2},
    ),
}


def rejection(mesh: Any, misuse: Misuse) -> str:
    """The message of the plan's rejection, or nothing; the model must be unchanged."""
    model = empty(misuse.model, device="meta")
    before = dict(model.named_parameters(remove_duplicate=False))
    try:
        check_plan(model, misuse.make(model), mesh.device_mesh, **misuse.changes)
    except misuse.error as error:
        after = dict(model.named_parameters(remove_duplicate=False))
        return str(error) if all(after[name] is before[name] for name in before) else "the model was changed"
    return ""


class Tied(nn.Module):
    """An embedding that is the head too."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding(*weight.shape, dtype=weight.dtype, _weight=weight.clone())
        self.head = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype, device="meta")
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))
