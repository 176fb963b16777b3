"""From the names of styles to styles, and the plan that a Hugging Face model brings along.

Names are those of transformers' tensor-parallel plans: its whole vocabulary is a style here, or is refused with why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer.tp_plan import generic, names_of
from torch_impl.parallelizer.tp_styles import (
    Divided,
    Experts,
    PackedColwise,
    PackedRowwise,
    Rowwise,
    Summed,
    Whole,
    WholeSeenInParts,
)

TRANSLATE = "parallelizer.translate_to_torch_parallel_style"


def _gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _split() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": Rowwise,
    "colwise_gather_output": _gathered,
    "colwise_rep": _gathered,
    "rowwise_split_input": _split,
    "rowwise_rep": _split,
    "embedding_rowwise": _split,
    "embedding_colwise": _gathered,
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": WholeSeenInParts,
    "replicate": Whole,
    "all_reduce": Summed,
    "packed_colwise": PackedColwise,
    "packed_rowwise": PackedRowwise,
    "moe_tp_experts": Experts,
    "moe_identity_expert": Divided,
}

EXPERT_PARALLEL = (
    "is an expert-parallel style and needs an ep mesh; remove it from the tensor-parallel plan or run experts with "
    "moe_tp_experts"
)
OF_PARAMETERS = "cuts a bare parameter, which has no forward; write {} for the module that owns it"
REFUSED = {
    "grouped_gemm": EXPERT_PARALLEL,
    "ep_dispatch_experts": EXPERT_PARALLEL,
    "ep_router": EXPERT_PARALLEL,
    "mla_kv_a_proj": (
        "needs qk_rope_head_dim of the config, to know which columns go past kv_b_proj, and a name cannot say it; "
        "leave the latent attention out of the plan"
    ),
    "local_params": (
        "stands on the owner of a parameter that is cut by itself; leave the module and its parameter out of the plan"
    ),
    "local": "is a style of transformers 4; write replicate, or moe_tp_experts for experts",
    "local_colwise": OF_PARAMETERS.format("colwise, or moe_tp_experts for experts,"),
    "local_rowwise": OF_PARAMETERS.format("rowwise, or moe_tp_experts for experts,"),
    "local_packed_rowwise": OF_PARAMETERS.format("packed_rowwise, or moe_tp_experts for experts,"),
    "gather": "is a style of transformers 4; write all_reduce, or moe_tp_experts for experts",
}


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """The style of a name, a fresh object at each call.

    Names are those of transformers' tensor-parallel plans, exact and case-sensitive. What a style does with its
    module's input, output and parameters is said by its class; `colwise`, `rowwise` and `sequence_parallel` are
    torch's. Names that mean expert parallelism, or the parameter of another module, are refused with the reason.

    Errors: TypeError for what is not a string; ValueError for a refused name, with what to write instead, and for
    an unknown one, with the nearest.
    """
    if not isinstance(style, str):
        raise TypeError(f"{TRANSLATE}: style={style!r} is a {type(style).__name__}; pass the name of a style, a string")
    if style in STYLES:
        return STYLES[style]()
    if style in REFUSED:
        raise ValueError(f"{TRANSLATE}: style={style!r} {REFUSED[style]}")
    near = get_close_matches(style, [*STYLES, *REFUSED], n=1, cutoff=0.0)[0]
    raise ValueError(f"{TRANSLATE}: style={style!r} is not known; nearest: {near!r}")


NAME = "parallelizer.get_hf_tp_shard_plan"
BASES = ("", "model", "language_model", "model.language_model")  # where a model has the one that has the layers


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Module name -> style, for every module that the model's own plan cuts.

    The plan is read from the class, from the instance and from the base model or its config, the later winning. Keys
    that match nothing in this model are dropped, as most of them in a pipeline part. The entry of a bare parameter is
    folded into the style of its module. The input embedding is cut over the vocabulary where layers are cut and the
    plan does not say how. Logits are gathered: whoever has a vocab-parallel loss overwrites the head's entry.

    A model without a plan gives {} and a UserWarning. Two calls share no style.

    Errors: TypeError unless a Module; ValueError for a style that is refused, naming key and style.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{NAME}: model is a {type(model).__name__}; pass a torch.nn.Module")
    named = named_styles(model)
    if not named:
        warnings.warn(
            f"{NAME}: {type(model).__name__} has no tensor-parallel plan; write one, or use a mesh without tp",
            UserWarning,
            stacklevel=2,
        )
    modules = [name for name, _ in model.named_modules() if name]
    plan = {key: _style(key, style) for key, style in named.items() if names_of(key, modules)}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for key, style in named.items():
        if key not in plan and names_of(key, parameters):
            _fold(plan, key, style)
    return plan


def named_styles(model: nn.Module) -> dict[str, str]:
    """The names of styles by key, those among them that match nothing in this model."""
    return _with_embedding(model, _sources(model))


def _sources(model: nn.Module) -> dict[str, str]:
    """The entries of all sources under the names of this model."""
    found: dict[str, str] = {}
    own = vars(model).get("_tp_plan")
    found |= getattr(type(model), "_tp_plan", None) or {}
    found |= own or {}
    for prefix in BASES:
        base = _submodule(model, prefix)
        if base is None:
            continue
        config = getattr(base, "config", None)
        plan = (getattr(base, "_tp_plan", None) if prefix else None) or getattr(config, "base_model_tp_plan", None)
        found |= {f"{prefix}.{key}" if prefix else key: style for key, style in (plan or {}).items()}
    return found


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    inner: Any = model
    for part in name.split(".") if name else ():
        inner = getattr(inner, part, None)
    return inner if isinstance(inner, nn.Module) else None


def _with_embedding(model: nn.Module, named: Mapping[str, str]) -> dict[str, str]:
    """The same plan, the input embedding in it."""
    cuts_layers = any("*" in key for key in named)
    embedding = _input_embedding(model)
    if not cuts_layers or embedding is None or any(names_of(key, [embedding]) for key in named):
        return dict(named)
    return {embedding: "embedding_rowwise", **named}


def _input_embedding(model: nn.Module) -> str | None:
    try:
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        embedding = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (module is embedding or (embedding is None and _is_input(name))):
            return name
    return None


def _is_input(name: str) -> bool:
    return name.rpartition(".")[2] == "embed_tokens"


def _style(key: str, style: str) -> ParallelStyle:
    try:
        return translate_to_torch_parallel_style(style)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{NAME}: key {key!r}: {error}") from None


def _fold(plan: dict[str, ParallelStyle], key: str, style: str) -> None:
    """Give the entry of a parameter to the style of its module."""
    path, _, leaf = key.rpartition(".")
    owner = plan.get(path) or plan.get(generic(path))
    if not isinstance(owner, Experts):
        has = f"its module has {type(owner).__name__}" if owner else "its module has no entry"
        raise ValueError(
            f"{NAME}: key {key!r}: style={style!r} cuts a bare parameter, and {has}; only stacks of moe_tp_experts "
            "can be cut so"
        )
    owner.stacks[leaf] = style
