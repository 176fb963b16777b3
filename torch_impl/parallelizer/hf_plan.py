"""Styles by their transformers names, and the tensor-parallel plan of a Hugging Face model.

Each style name in transformers' tensor-parallel plans is either supported here or rejected with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from torch_impl.contract import Module, Rejected, contract, type_name
from torch_impl.parallelizer.head_styles import Conv1DColwise, Conv1DPackedColwise, Conv1DRowwise, PerHead
from torch_impl.parallelizer.module_names import generic, names_of
from torch_impl.parallelizer.registry import ModelClass, class_name_of
from torch_impl.parallelizer.tp_styles import (
    DividedInput,
    Experts,
    PackedColwise,
    PackedRowwise,
    Replicated,
    ReplicatedOnShards,
    Rowwise,
    SummedOutput,
)

Entry = str | Callable[[], Any] | None  # the name of a style, a function that makes one, or no style
PlanEntries = Mapping[str, Entry]


def _colwise_gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _rowwise_of_full_input() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


# A style has several names if releases of transformers name it differently.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": Rowwise,
    "colwise_gather_output": _colwise_gathered,
    "colwise_rep": _colwise_gathered,
    "rowwise_split_input": _rowwise_of_full_input,
    "rowwise_rep": _rowwise_of_full_input,
    "embedding_rowwise": _rowwise_of_full_input,
    "embedding_colwise": _colwise_gathered,
    "sequence_parallel": SequenceParallel,
    "replicated_with_grad_allreduce": ReplicatedOnShards,
    "replicate": Replicated,
    "all_reduce": SummedOutput,
    "packed_colwise": PackedColwise,
    "packed_rowwise": PackedRowwise,
    "moe_tp_experts": Experts,
    "moe_identity_expert": DividedInput,
    # Our own names, for families without a plan in transformers.
    "per_head": PerHead,
    "conv1d_colwise": Conv1DColwise,
    "conv1d_packed_colwise": Conv1DPackedColwise,
    "conv1d_rowwise": Conv1DRowwise,
}

EXPERT_PARALLEL = (
    "is an expert-parallel style and needs an ep mesh; remove it from the tensor-parallel plan or run experts with "
    "moe_tp_experts"
)
OF_PARAMETERS = "shards a bare parameter, which has no forward; write {} for the module that owns it"
REJECTED = {
    "grouped_gemm": EXPERT_PARALLEL,
    "ep_dispatch_experts": EXPERT_PARALLEL,
    "ep_router": EXPERT_PARALLEL,
    "mla_kv_a_proj": (
        "needs qk_rope_head_dim of the config, to know which columns go past kv_b_proj, and a name cannot give it; "
        "leave the latent attention out of the plan"
    ),
    "local_params": (
        "is for the owner of a parameter that is sharded by itself; leave the module and its parameter out of the plan"
    ),
    "local": "is a style of transformers 4; write replicate, or moe_tp_experts for experts",
    "local_colwise": OF_PARAMETERS.format("colwise, or moe_tp_experts for experts,"),
    "local_rowwise": OF_PARAMETERS.format("rowwise, or moe_tp_experts for experts,"),
    "local_packed_rowwise": OF_PARAMETERS.format("packed_rowwise, or moe_tp_experts for experts,"),
    "gather": "is a style of transformers 4; write all_reduce, or moe_tp_experts for experts",
}
# Plans by class name, so that transformers is not imported; subclasses inherit them. Keys are names in that class.
TP_PLANS: dict[str, PlanEntries] = {
    "GPT2Model": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "conv1d_packed_colwise",
        "h.*.attn.c_proj": "conv1d_rowwise",
        "h.*.mlp.c_fc": "conv1d_colwise",
        "h.*.mlp.c_proj": "conv1d_rowwise",
    },
    "GPT2LMHeadModel": {"lm_head": "colwise_gather_output"},
    # Each head's mask is computed from the values of all heads, so projections are gathered and attention is full.
    "DogeModel": {
        **{f"layers.*.self_attn.{name}": "colwise_gather_output" for name in ("q_proj", "k_proj", "v_proj")},
        "layers.*.self_attn.dt_proj": None,
        "layers.*.self_attn.o_proj": "rowwise_split_input",
    },
    # The activation between sharded layers has parameters, so its gradient needs a sum over ranks; transformers 5.23
    # leaves it out.
    "ApertusModel": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    # transformers' plan has the head alone. Experts are computed in full by every rank, or sharded over ep.
    "GptOssModel": {
        **{f"layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn": "per_head",
    },
    # transformers' plan has the experts alone. A Mamba layer is computed in full by every rank.
    "NemotronHModel": {
        **{f"layers.*.mixer.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "up_proj")},
        **{f"layers.*.mixer.{name}": "rowwise" for name in ("o_proj", "down_proj")},
        "layers.*.mixer.shared_experts.up_proj": "colwise",
        "layers.*.mixer.shared_experts.down_proj": "rowwise",
    },
}
# The names under which a model may hold the inner model with the layers.
INNER_MODELS = ("", "model", "language_model", "model.language_model", "transformer")


@contract
def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """The style with this name, as a new object in each call.

    Names are case-sensitive: the names in transformers' tensor-parallel plans, and three names for Conv1D, for which
    transformers has no plan. A style's class documents the layout of its module's input, output and parameters;
    `colwise`, `rowwise` and `sequence_parallel` are torch's. Names for expert parallelism, or for the parameter of
    another module, are rejected with the reason.

    Errors: TypeError if style is not a string; ValueError for a rejected name, with its replacement, and for an
    unknown name, with the nearest one.
    """
    _validate_style(f"style={style!r}", style)
    return STYLES[style]()


def _validate_style(begin: str, style: str) -> None:
    """Rejected, beginning with `begin`, for the name of a rejected or unknown style."""
    if style in REJECTED:
        raise Rejected(f"{begin} {REJECTED[style]}")
    if style not in STYLES:
        nearest = get_close_matches(style, [*STYLES, *REJECTED], n=1, cutoff=0.0)[0]
        raise Rejected(f"{begin} is not known; nearest: {nearest!r}")


@contract
def register_tp_plan(model_class: ModelClass, plan: PlanEntries) -> None:
    """Register entries of a class's tensor-parallel plan; they override the entries of the model and its config.

    `model_class` is the class or its name; subclasses inherit the entries. If the class is inside another model, such
    as the decoder of a causal model, the entries apply at its place there. A value of `plan` is a style's name, a
    function that makes a style, or None to leave the key out. A second call for a class replaces the first.

    Errors: TypeError for a class, key or value of a wrong type; ValueError for an unknown or rejected style, as in
    `translate_to_torch_parallel_style`.
    """
    name = class_name_of(model_class)
    if not isinstance(plan, Mapping):
        raise Rejected(f"plan is {type_name(plan)}; pass a dict of module name -> style", TypeError)
    for key, entry in plan.items():
        if not isinstance(key, str) or not (entry is None or isinstance(entry, str) or callable(entry)):
            problem = f"plan[{key!r}] is {entry!r}"
            raise Rejected(f"{problem}; pass the name of a style, a function that makes one, or None", TypeError)
        if isinstance(entry, str):
            _validate_style(f"plan[{key!r}]={entry!r}", entry)
    TP_PLANS[name] = dict(plan)


def registered_tp_plan(model: nn.Module) -> dict[str, Entry]:
    """The registered entries of a model's class and its base classes; the most derived class wins."""
    entries: dict[str, Entry] = {}
    for cls in reversed(type(model).__mro__):
        entries |= TP_PLANS.get(cls.__name__, {})
    return entries


@contract
def get_hf_tp_shard_plan(model: Module) -> dict[str, ParallelStyle]:
    """The model's own tensor-parallel plan, as a dict from module name to style.

    The plan is read from the class, from the instance, from the base model or its config, and from the registered
    entries of either class (`register_tp_plan`, and this package's own, such as GPT-2's); later sources win. Keys that
    match nothing in this model are dropped, as most are in a pipeline stage. The entry of a bare parameter is folded
    into its module's style. If layers are sharded and the plan does not mention the input embedding, it is sharded over
    the vocabulary. Logits are gathered: replace the head's entry for a vocabulary-parallel loss.

    For a model without a plan the result is {}, with a UserWarning. Each call makes new styles.

    Errors: TypeError if model is not a Module; ValueError for a rejected style, with its key.
    """
    names = style_names(model)
    if not names:
        warnings.warn(
            f"parallelizer.get_hf_tp_shard_plan: {type(model).__name__} has no tensor-parallel plan; write one, or use "
            "a mesh without tp",
            UserWarning,
            stacklevel=3,
        )
    # 1. Take the entries of modules.
    modules = [name for name, _ in model.named_modules() if name]
    plan = {key: _style(key, style) for key, style in names.items() if names_of(key, modules)}
    # 2. Fold the entries of bare parameters into their modules' styles.
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for key, style in names.items():
        if key not in plan and names_of(key, parameters):
            _fold_into_owner(plan, key, style)
    return plan


def style_names(model: nn.Module) -> dict[str, Any]:
    """The entry of each key: a style's name or a function that makes one. Keys that match nothing are included."""
    return _with_embedding(model, _entries(model))


def _entries(model: nn.Module) -> dict[str, Entry]:
    """The entries of all sources, by this model's module names; later sources win."""
    entries: dict[str, Entry] = {}
    # Use `vars`: an attribute lookup would return the class's plan if the instance has none.
    instance_plan = vars(model).get("_tp_plan")
    entries |= getattr(type(model), "_tp_plan", None) or {}
    entries |= instance_plan or {}
    bases = {prefix: _submodule(model, prefix) for prefix in INNER_MODELS}
    for prefix, base in bases.items():
        config = getattr(base, "config", None)
        # The model's attribute was read above; a base model inside it may have its own, or a plan in its config.
        plan = (getattr(base, "_tp_plan", None) if prefix else None) or getattr(config, "base_model_tp_plan", None)
        entries |= _prefixed(prefix, plan or {})
    for prefix, base in bases.items():
        registered = _prefixed(prefix, {} if base is None else registered_tp_plan(base))
        # An entry of None drops the key, whatever the model's own plan has for it.
        entries = {key: entry for key, entry in (entries | registered).items() if registered.get(key, "") is not None}
    return entries


def _prefixed(prefix: str, plan: Mapping[str, Entry]) -> dict[str, Entry]:
    return {f"{prefix}.{key}" if prefix else key: entry for key, entry in plan.items()}


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    inner: Any = model
    for part in name.split(".") if name else ():
        inner = getattr(inner, part, None)
    return inner if isinstance(inner, nn.Module) else None


def _with_embedding(model: nn.Module, names: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries, with one added for the input embedding if layers are sharded and none exists."""
    shards_layers = any("*" in key for key in names)
    embedding = _input_embedding(model)
    if not shards_layers or embedding is None or any(names_of(key, [embedding]) for key in names):
        return dict(names)
    return {embedding: "embedding_rowwise", **names}


def _input_embedding(model: nn.Module) -> str | None:
    try:
        embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError):
        embedding = None
    for name, module in model.named_modules():
        is_named = embedding is None and name.rpartition(".")[2] == "embed_tokens"
        if isinstance(module, nn.Embedding) and (module is embedding or is_named):
            return name
    return None


def _style(key: str, style: Any) -> Any:
    try:
        return style() if callable(style) else translate_to_torch_parallel_style(style)
    except (TypeError, ValueError) as error:
        raise type(error)(f"parallelizer.get_hf_tp_shard_plan: key {key!r}: {error}") from None


def _fold_into_owner(plan: dict[str, ParallelStyle], key: str, style: Any) -> None:
    """Put a parameter's entry into its module's style."""
    path, _, leaf = key.rpartition(".")
    # A key names one layer by its number, or all layers by *; the module's entry may use either.
    owner = plan.get(path) or plan.get(generic(path))
    if not isinstance(owner, Experts):
        has = f"its module has {type(owner).__name__}" if owner else "its module has no entry"
        raise Rejected(
            f"key {key!r}: style={style!r} shards a bare parameter, and {has}; only "
            "stacks of moe_tp_experts can be sharded so"
        )
    owner.stacks[leaf] = style
