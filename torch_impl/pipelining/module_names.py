"""Names of the modules of each stage, for models laid out as transformers lays them out."""

from __future__ import annotations

from itertools import accumulate

from torch_impl.pipelining.arguments import Number, check_switch, check_text
from torch_impl.pipelining.partition import layer_counts

MULTIMODAL = (
    "vision_tower",
    "visual",
    "vision_model",
    "image_encoder",
    "vision_encoder",
    "embed_vision",
    "audio_tower",
    "audio_encoder",
    "audio_model",
    "mm_projector",
    "multi_modal_projector",
    "multimodal_projector",
    "vision_projector",
    "vit_large_projector",
    "audio_projector",
)


def generate_hf_model_fqn_per_model_part(
    num_stages: int,
    num_layers: int,
    include_embeddings: bool = True,
    include_lm_head: bool = True,
    include_rotary_emb: bool = True,
    include_multimodal_encoders: bool = True,
    extra_module_fqns: list[str] | None = None,
    fqn_prefix: str = "model.",
    lm_head_fqn: str = "lm_head",
    *,
    embed_cost: Number = 0.0,
    head_cost: Number = 0.0,
) -> list[list[str]]:
    """Names of the modules of each stage; names that a model has not are harmless.

    The first stage begins with the embedding, encoders of other modalities and the extra names, the last one ends
    with norm and head, and every one closes with the rotary embedding, which has no parameters. Layers are cut as
    `partition.layer_counts` says: costs are in layers, and without them the first stages get one layer more.

    >>> only = dict(include_multimodal_encoders=False, include_rotary_emb=False)
    >>> generate_hf_model_fqn_per_model_part(2, 3, **only)[1]
    ['model.layers.2', 'model.norm', 'lm_head']

    Errors: ValueError for fewer layers than stages, sizes below 1 or negative costs; TypeError for other kinds.
    """
    name = "generate_hf_model_fqn_per_model_part"
    switches = {
        "include_embeddings": include_embeddings,
        "include_lm_head": include_lm_head,
        "include_rotary_emb": include_rotary_emb,
        "include_multimodal_encoders": include_multimodal_encoders,
    }
    for switch, value in switches.items():
        check_switch(name, switch, value)
    check_text(name, "fqn_prefix", fqn_prefix)
    check_text(name, "lm_head_fqn", lm_head_fqn)
    extra = _checked_names(name, extra_module_fqns)
    counts = layer_counts(num_stages, num_layers, embed_cost, head_cost)
    ends = list(accumulate(counts))
    stages = [
        [f"{fqn_prefix}layers.{layer}" for layer in range(end - count, end)]
        for count, end in zip(counts, ends, strict=True)
    ]
    others = [f"{fqn_prefix}{module}" for module in MULTIMODAL] if include_multimodal_encoders else []
    embedding = [f"{fqn_prefix}embed_tokens"] if include_embeddings else []
    stages[0] = [*embedding, *others, *extra, *stages[0]]
    stages[-1] += [f"{fqn_prefix}norm", *([lm_head_fqn] if include_lm_head else [])]
    return [[*stage, *([f"{fqn_prefix}rotary_emb"] if include_rotary_emb else [])] for stage in stages]


def _checked_names(function: str, names: object) -> list[str]:
    if names is None:
        return []
    if not isinstance(names, (list, tuple)):
        raise TypeError(
            f"pipelining.{function}: extra_module_fqns={names!r} is a {type(names).__name__}; pass a list of names"
        )
    for index, module in enumerate(names):
        check_text(function, f"extra_module_fqns[{index}]", module)
    return list(names)
