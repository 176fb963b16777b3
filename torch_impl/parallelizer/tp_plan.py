"""Tensor-parallel plans: validate a plan against a model, and apply it.

A key is the dotted name of a module or has wildcards, see `module_names`. `validate_styles`
resolves a plan once, to a style for each module; `shard_modules` applies these styles without further validation.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

from torch_impl.contract import Mesh, Module, PositiveInt, TypeProblem, contract, type_name
from torch_impl.parallelizer.head_styles import GROUPS, Conv1DPackedColwise, ReplicatedHeads
from torch_impl.parallelizer.lora_styles import module_placements, with_adapter
from torch_impl.parallelizer.module_names import matches, names_of, nearest_names
from torch_impl.parallelizer.tp_styles import (
    LocalForward,
    Replicated,
    is_shard_of_parts,
    owner_of,
    sharded_dim,
)

# The projections to heads, and the config's field with the number of heads.
HEADS = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
    "c_attn": "num_attention_heads",
}
NORMS = {  # norms of heads, and the projection before each
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q_proj"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k_proj"),
}
REMOVED = "removed_modules"  # attribute with the names of the modules that a pipeline's split took out of a part


class PlanKind:
    """A mapping of module names to styles."""

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return TypeProblem(f" is {type_name(value)}; pass a dict of module name -> ParallelStyle, or None")
        for key, style in value.items():
            if not isinstance(key, str):
                return TypeProblem(f" has the key {key!r}, {type_name(key)}; keys are names of modules")
            if not isinstance(style, ParallelStyle):
                hint = "; translate_to_torch_parallel_style makes one of a name" if isinstance(style, str) else ""
                return TypeProblem(f"[{key!r}] is {style!r}, not a ParallelStyle{hint}")
        return None


Plan = Annotated[Mapping[str, ParallelStyle], PlanKind()]


class PlanEntry(NamedTuple):
    """The plan's entry for one module: the key that matched it, and the style."""

    key: str
    style: ParallelStyle


Styles = Mapping[str, PlanEntry]  # by module name


@contract
def check_plan(model: Module, plan: Plan | None, tp_mesh: Mesh, *, fsdp_size: PositiveInt = 1) -> None:
    """Reject a plan that cannot be applied or would give wrong results. Nothing is changed or sent.

    `fsdp_size` is the number of ranks that FSDP shards over afterwards.

    Errors: TypeError for a model, plan, key, style or mesh of a wrong type. ValueError for an empty or missing plan
            over several ranks, a key that matches nothing, a module that two keys match or that is already sharded, a
            style that cannot shard its module, a number of heads that the ranks do not divide, heads sharded in only
            part of attention, a norm over all heads behind sharded heads, a shared parameter with two placements, and
            packed halves under FSDP over several ranks. UserWarning for a per-head norm that the plan leaves out.
    """
    _check_one_axis(tp_mesh)
    warn_of_norms(model, validate_styles(model, plan or {}, tp_mesh.size(), fsdp_size), tp_mesh.size())


@contract
def apply_plan(model: Module, plan: Plan | None, tp_mesh: Mesh) -> None:
    """Shard the modules that the plan names over a 1-D mesh, in place.

    Parameters become DTensors over tp, with the values of the mesh's first rank. Tied parameters stay tied and frozen
    parameters stay frozen; torch's styles alone would untie and unfreeze them.

    Cost:   1 scatter or broadcast for each parameter of a named module, none on the meta device.
    Errors: as `check_plan`, before anything is changed.
    """
    _check_one_axis(tp_mesh)
    shard_modules(model, validate_styles(model, plan or {}, tp_mesh.size(), fsdp_size=1), tp_mesh)


# ---- Keys


def styles_by_module(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, PlanEntry]:
    """The plan's entry for each module that it names.

    Errors: ValueError for a key that matches nothing, or a module that two keys match.
    """
    modules = dict(model.named_modules())
    styles: dict[str, PlanEntry] = {}
    for key, style in plan.items():
        names = names_of(key, modules)
        if not names and not _was_removed(key, model):
            kind = type(model).__name__
            raise ValueError(
                f"tp_shard_plan: key {key!r} matches no module of {kind}; nearest: {nearest_names(key, modules)}"
            )
        for name in names:
            if name in styles:
                raise ValueError(f"tp_shard_plan: keys {styles[name].key!r} and {key!r} both match {name!r}; keep one")
            styles[name] = PlanEntry(key, style)
    return styles


def _was_removed(key: str, model: nn.Module) -> bool:
    """Whether a key names a module that a pipeline's split took out of this part, or a module inside one."""
    parts = key.split(".")
    removed = [name.split(".") for name in getattr(model, REMOVED, ())]
    return any(matches(parts[: len(path)], path) or matches(parts, path[: len(parts)]) for path in removed)


# ---- Validation against a model


def validate_styles(
    model: nn.Module, plan: Mapping[str, ParallelStyle], tp: int, fsdp_size: int
) -> dict[str, PlanEntry]:
    """Validate a plan for `tp` ranks, which need not exist; returns the entry of each module that it names.

    Errors: ValueError as `check_plan`.
    """
    # 1. Check that there is a plan over several ranks, and that each key matches modules that its style can shard.
    if not plan and tp > 1:
        raise ValueError(
            f"tp_shard_plan: has no entry for tp={tp}, so that each rank would compute the same; "
            "pass get_hf_tp_shard_plan(model), or a mesh without tp"
        )
    styles = with_replicated_heads(model, styles_by_module(model, plan), tp)
    placements: dict[str, Placement] = {}
    for name, (key, style) in styles.items():
        placements |= _module_placements(model, name, key, style)
    # 2. Check that each rank gets whole heads, the same in queries, keys, values and norms; that no parameter is
    #    sharded in two ways; and that FSDP can shard every parameter again.
    for problem in chain(_head_problems(model, styles, tp), _parameter_problems(model, placements, fsdp_size)):
        raise ValueError(f"tp_shard_plan: {problem}")
    return styles


def with_replicated_heads(model: nn.Module, styles: Mapping[str, PlanEntry], tp: int) -> dict[str, PlanEntry]:
    """The styles, with `ReplicatedHeads` for keys and values that have fewer heads than there are ranks.

    This needs a number of ranks that divides the query heads and is a multiple of the key and value heads, so that each
    rank's queries attend to one head, and an attention module that has the number of queries per head.
    """
    text, replaced = _text_config(model), dict(styles)
    queries = getattr(text, "num_attention_heads", None)
    for name, (key, style) in styles.items():
        path, _, leaf = name.rpartition(".")
        heads = getattr(text, HEADS.get(leaf, ""), None)
        if leaf not in ("k_proj", "v_proj") or type(style) is not ColwiseParallel or not _leaves_heads_sharded(style):
            continue
        if not (isinstance(heads, int) and isinstance(queries, int) and heads < tp):
            continue
        if tp % heads == 0 and queries % tp == 0 and hasattr(model.get_submodule(path), GROUPS):
            replaced[name] = PlanEntry(key, ReplicatedHeads(heads, queries // tp))
    return replaced


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def warn_of_norms(model: nn.Module, styles: Styles, tp: int) -> None:
    """Warn of the first norm behind sharded heads whose gradient would include this rank's heads only."""
    for name, _, key in _unsummed_norms(model, styles) if tp > 1 else ():
        state = "is replicate" if name in styles else "is not in the plan"
        warnings.warn(
            f"tp_shard_plan: {name!r} {state} while {key!r} shards the heads before it, so its gradient "
            "lacks the other ranks' heads; add it as replicated_with_grad_allreduce",
            UserWarning,
            stacklevel=4,
        )
        return


def _check_one_axis(tp_mesh: DeviceMesh) -> None:
    if tp_mesh.ndim != 1:
        raise ValueError(f"tp_mesh: has {tp_mesh.ndim} axes {tp_mesh.mesh_dim_names}; pass the tensor-parallel one")


def _module_placements(model: nn.Module, name: str, key: str, style: ParallelStyle) -> dict[str, Placement]:
    """The placements of a module's parameters, by their names in the model."""
    module = model.get_submodule(name)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ValueError(f"tp_shard_plan: {name!r} already has DTensor parameters; apply a plan once, before FSDP")
    try:
        placements = module_placements(style, module)
    except ValueError as error:
        raise ValueError(f"tp_shard_plan: key {key!r}: {error}") from None
    return {f"{name}.{leaf}" if name else leaf: placement for leaf, placement in placements.items()}


def _head_problems(model: nn.Module, styles: Styles, tp: int) -> Iterator[str]:
    """Problems with heads: the ranks do not divide them, or a rank would pair them with other heads or their norms."""
    text = _text_config(model)
    leaves = {name: name.rpartition(".") for name, entry in styles.items() if _leaves_heads_sharded(entry.style)}
    heads = {name: (path, leaf) for name, (path, _, leaf) in leaves.items() if leaf in HEADS}
    # 1. The number of ranks must divide the number of heads.
    for name, (_, leaf) in heads.items():
        if isinstance(styles[name].style, ReplicatedHeads):
            continue
        counts = getattr(text, HEADS[leaf], None) or getattr(text, "num_attention_heads", None)
        for count in counts if isinstance(counts, list | tuple) else [counts]:
            if isinstance(count, int) and count % tp:
                yield (
                    f"key {styles[name].key!r} shards heads, and {HEADS[leaf]}={count} does not divide by tp={tp}; "
                    f"{_remedy(leaf)}, or leave attention out of the plan"
                )
    if tp == 1:
        return
    # 2. If only queries, or only keys or values, were sharded, heads of different ranks would be paired.
    for name, (path, _) in heads.items():
        siblings = {other: f"{path}.{other}" if path else other for other in HEADS}
        for other, sibling in siblings.items():
            if sibling not in styles and isinstance(getattr(model.get_submodule(path), other, None), nn.Module):
                yield (
                    f"key {styles[name].key!r} shards heads, and its sibling {sibling!r} is not in the plan, so that "
                    "heads of different ranks would meet; give it the same style, or leave attention out of the plan"
                )
    # 3. A norm with weights for the features of all heads does not fit behind a rank's own heads.
    for name, module, key in _unsummed_norms(model, styles):
        path, _, leaf = name.rpartition(".")
        features = getattr(model.get_submodule(f"{path}.{NORMS[leaf]}"), "out_features", None)
        if next(module.parameters()).numel() == features:
            yield (
                f"{name!r} has weights for all {features} features of the heads, and key {key!r} leaves each rank a "
                "part of them; use colwise_gather_output for the projections and rowwise_split_input behind "
                "attention, or leave attention out of the plan"
            )


def _remedy(leaf: str) -> str:
    if leaf not in ("k_proj", "v_proj"):
        return "use a tp that divides it"
    return f"use a tp that divides it, or a multiple of it if attention has {GROUPS}"


def _leaves_heads_sharded(style: Any) -> bool:
    if isinstance(style, Conv1DPackedColwise | ReplicatedHeads):
        return True
    return isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),)


def _parameter_problems(model: nn.Module, placements: Mapping[str, Placement], fsdp_size: int) -> Iterator[str]:
    """Shared parameters with two placements, and packed halves that FSDP would also shard."""
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        one, two = placements.get(first), placements.get(name)
        if one != two:
            both = f"{first!r} is {one or 'not in the plan'} and {name!r} is {two or 'not in the plan'}"
            yield f"{both}, but they share one parameter; give both the same placement"
    # FSDP shards the first dim; halves of another dim, as in a stack of experts, are not affected.
    packed = [name for name, placement in placements.items() if _shards_parts_of_rows(placement)]
    if packed and fsdp_size > 1:
        yield (
            f"{packed[0]!r} is packed and FSDP would shard it over {fsdp_size} ranks; torch would gather its rows "
            "in another order; use data_parallel_sharding_strategy='no_shard', or tp alone"
        )


def _shards_parts_of_rows(placement: Placement) -> bool:
    dim, _ = sharded_dim(placement)
    return is_shard_of_parts(placement) and dim == 0


def _unsummed_norms(model: nn.Module, styles: Styles) -> Iterator[tuple[str, nn.Module, str]]:
    """Norms behind sharded heads that are replicated or not in the plan, as (name, module, key of the projection)."""
    for name, module in model.named_modules():
        path, _, leaf = name.rpartition(".")
        projection = styles.get(f"{path}.{NORMS.get(leaf)}")
        is_summed = name in styles and type(styles[name].style) is not Replicated
        if projection is None or is_summed or not _leaves_heads_sharded(projection.style):
            continue
        if next(module.parameters(), None) is not None:
            yield name, module, projection.key


# ---- Application


def shard_modules(model: nn.Module, styles: Styles, tp_mesh: DeviceMesh) -> None:
    """Shard modules of a model, each by its style; tied and frozen parameters are kept, as in `apply_plan`."""
    ties = tied_names(model)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    # 1. Apply the styles. torch makes a new parameter for each name of a module.
    for name, (_, style) in styles.items():
        module = model.get_submodule(name)
        parallelize_module(module, tp_mesh, with_adapter(style, module))
        if isinstance(style, LocalForward) and name:
            parent = model.get_submodule(name.rpartition(".")[0])
            vars(parent).update(style.local_sizes(parent, tp_mesh.size()))
    # 2. Freeze new parameters whose original was frozen.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen and parameter.requires_grad:
            parameter.requires_grad_(False)
    # 3. Tie parameters again that were one under several names.
    for first, *aliases in ties:
        _tie(model, first, aliases)


def tied_names(model: nn.Module) -> list[list[str]]:
    """The groups of names that share one parameter, each in the model's order."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie(model: nn.Module, first: str, aliases: list[str]) -> None:
    shared = model.get_parameter(first)
    placements = shared.placements if isinstance(shared, DTensor) else None
    for name in aliases:
        owner, leaf = owner_of(model, name)
        parameter = owner.get_parameter(leaf)
        if parameter is shared:
            continue
        if (parameter.placements if isinstance(parameter, DTensor) else None) != placements:
            # Only users' own styles get here: the placements of all others are compared before anything is sharded.
            raise ValueError(f"tp_shard_plan: {first!r} and {name!r} share a parameter and were sharded in two ways")
        owner.register_parameter(leaf, shared)
