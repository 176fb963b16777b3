"""Tensor-parallel plans: their keys, what a plan is refused for, and how it is applied to a model.

A key is the dotted name of a module, in which a part may have wildcards, as `*` for each layer.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer.tp_styles import Whole, is_halved, owner_of, placements_of

REMOVED = "removed_modules"  # names of the modules that a pipeline's split took out of a part, as it lists them


def names_of(key: str, names: Iterable[str]) -> list[str]:
    """Those of the names that a key means: as many dotted parts, each alike."""
    parts = key.split(".")
    return [name for name in names if alike(parts, name.split("."))]


def alike(pattern: list[str], parts: list[str]) -> bool:
    """Whether each part is as the pattern has it."""
    return len(pattern) == len(parts) and all(map(fnmatchcase, parts, pattern))


def was_removed(key: str, model: nn.Module) -> bool:
    """Whether a key names a module, or one inside a module, that a pipeline's split took out of this part."""
    parts = key.split(".")
    removed = [name.split(".") for name in getattr(model, REMOVED, ())]
    return any(alike(parts[: len(gone)], gone) or alike(parts, gone[: len(parts)]) for gone in removed)


def generic(name: str) -> str:
    """A module's name with `*` for the number of its layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def nearest(key: str, model: nn.Module) -> str:
    """The names, as a plan writes them, that are most like a key."""
    known = dict.fromkeys(generic(name) for name, _ in model.named_modules() if name)
    return ", ".join(repr(name) for name in get_close_matches(key, list(known), n=2, cutoff=0.0))


def styled_modules(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Key and style of each module that the plan means, by the module's name.

    Errors: ValueError for a key that matches nothing, or a module that two keys mean.
    """
    modules = dict(model.named_modules())
    found: dict[str, tuple[str, Any]] = {}
    for key, style in plan.items():
        names = names_of(key, modules)
        if not names and not was_removed(key, model):
            kind = type(model).__name__
            raise ValueError(f"tp_shard_plan: key {key!r} matches no module of {kind}; nearest: {nearest(key, model)}")
        for name in names:
            if name in found:
                raise ValueError(f"tp_shard_plan: keys {found[name][0]!r} and {key!r} both mean {name!r}; keep one")
            found[name] = key, style
    return found


HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
NORMS = {  # behind the projection that makes the heads
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "q_proj"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "k_proj"),
}
Styled = Mapping[str, tuple[str, Any]]


def check_plan(
    model: nn.Module, plan: Mapping[str, ParallelStyle] | None, tp_mesh: DeviceMesh, *, fsdp_size: int = 1
) -> None:
    """Refuse a plan that cannot be applied, or would be wrong. Nothing is changed or sent.

    `fsdp_size` is the number of ranks that FSDP shards over afterwards.

    Errors: TypeError for a model, plan, key, style or mesh of another kind. ValueError for an empty plan or none over
            several ranks, a key that matches nothing, a module that two keys mean or that is already cut, a style
            that cannot cut its module, heads that the ranks cannot share, heads cut in part of attention, a norm of
            all heads behind a part of them, a shared parameter cut in two ways, and packed halves under FSDP over
            several ranks. A norm of each head that the plan leaves out is a UserWarning.
    """
    refuse(model, plan, tp_mesh, fsdp_size)
    if tp_mesh.size() > 1:
        _warn_of_norms(model, styled_modules(model, plan or {}))


def refuse(model: nn.Module, plan: Mapping[str, ParallelStyle] | None, tp_mesh: DeviceMesh, fsdp_size: int = 1) -> None:
    """What `check_plan` raises."""
    check_kinds(model, plan)
    if not isinstance(tp_mesh, DeviceMesh):
        raise TypeError(f"tp_mesh: is a {type(tp_mesh).__name__}; pass a 1-D DeviceMesh")
    if tp_mesh.ndim != 1:
        raise ValueError(f"tp_mesh: has {tp_mesh.ndim} axes {tp_mesh.mesh_dim_names}; pass the tensor-parallel one")
    refuse_sizes(model, plan or {}, tp_mesh.size(), fsdp_size)


def refuse_sizes(model: nn.Module, plan: Mapping[str, ParallelStyle], tp: int, fsdp_size: int) -> None:
    """What `check_plan` raises for so many ranks, which need not be there."""
    if not plan and tp > 1:
        raise ValueError(
            f"tp_shard_plan: has no entry for tp={tp}, so that each rank would compute the same; "
            "pass get_hf_tp_shard_plan(model), or a mesh without tp"
        )
    styled = styled_modules(model, plan)
    placements: dict[str, Placement] = {}
    for name, (key, style) in styled.items():
        placements |= _module_placements(model, name, key, style)
    _check_heads(model, styled, tp)
    if tp > 1:
        _check_siblings(model, styled)
        _check_norms(model, styled)
    _check_ties(model, placements)
    _check_packed(placements, fsdp_size)


def check_kinds(model: Any, plan: Any) -> None:
    """TypeError for a model, a plan, a key or a style that is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: is a {type(model).__name__}; pass a torch.nn.Module")
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(f"tp_shard_plan: is a {type(plan).__name__}; pass a dict of module name -> ParallelStyle")
    for key, style in (plan or {}).items():
        if not isinstance(key, str):
            raise TypeError(f"tp_shard_plan: key {key!r} is a {type(key).__name__}; keys are names of modules")
        if not isinstance(style, ParallelStyle):
            hint = "; translate_to_torch_parallel_style makes one of a name" if isinstance(style, str) else ""
            raise TypeError(f"tp_shard_plan: the value of {key!r} is {style!r}, not a ParallelStyle{hint}")


def _module_placements(model: nn.Module, name: str, key: str, style: ParallelStyle) -> dict[str, Placement]:
    module = model.get_submodule(name)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ValueError(f"tp_shard_plan: {name!r} already has DTensor parameters; apply a plan once, before FSDP")
    try:
        own = placements_of(style, module)
    except ValueError as error:
        raise ValueError(f"tp_shard_plan: key {key!r}: {error}") from None
    return {f"{name}.{leaf}" if name else leaf: placement for leaf, placement in own.items()}


def _check_heads(model: nn.Module, styled: Styled, tp: int) -> None:
    config = getattr(model, "config", None)
    text: Any = getattr(config, "get_text_config", lambda: config)()
    for name, (key, style) in styled.items():
        count = HEADS.get(name.rpartition(".")[2])
        if count is None or not _leaves_heads_cut(style):
            continue
        heads = getattr(text, count, None) or getattr(text, "num_attention_heads", None)
        for number in heads if isinstance(heads, list | tuple) else [heads]:
            if isinstance(number, int) and number % tp:
                raise ValueError(
                    f"tp_shard_plan: key {key!r} cuts heads, and {count}={number} does not divide by tp={tp}; "
                    f"use a tp that divides it, or leave attention out of the plan"
                )


def _check_siblings(model: nn.Module, styled: Styled) -> None:
    """Heads of which only queries, or only keys or values, are this rank's are paired with those of another rank."""
    for name, (key, style) in styled.items():
        path, _, leaf = name.rpartition(".")
        if leaf not in HEADS or not _leaves_heads_cut(style):
            continue
        for other in HEADS:
            beside = f"{path}.{other}" if path else other
            if beside not in styled and isinstance(getattr(model.get_submodule(path), other, None), nn.Module):
                raise ValueError(
                    f"tp_shard_plan: key {key!r} cuts heads, and {beside!r} beside it is not in the plan, so that "
                    "heads of different ranks would meet; give it the same style, or leave attention out of the plan"
                )


def _leaves_heads_cut(style: Any) -> bool:
    return isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),)


def _check_ties(model: nn.Module, placements: Mapping[str, Placement]) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        one, two = placements.get(other), placements.get(name)
        if one != two:
            said = f"{other!r} is {one or 'not in the plan'} and {name!r} is {two or 'not in the plan'}"
            raise ValueError(f"tp_shard_plan: {said}, but they share one parameter; give both the same placement")


def _check_packed(placements: Mapping[str, Placement], fsdp_size: int) -> None:
    packed = [name for name, placement in placements.items() if is_halved(placement)]
    if packed and fsdp_size > 1:
        raise ValueError(
            f"tp_shard_plan: {packed[0]!r} is packed and FSDP would shard it over {fsdp_size} ranks, from which torch "
            "puts its rows together in another order; use data_parallel_sharding_strategy='no_shard', or tp alone"
        )


def _norms_of_cut_heads(model: nn.Module, styled: Styled) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, module and key of the projection of each norm that is left out, or replicated, behind cut heads."""
    for name, module in model.named_modules():
        path, _, leaf = name.rpartition(".")
        key, style = styled.get(f"{path}.{NORMS.get(leaf)}", ("", None))
        is_summed = name in styled and type(styled[name][1]) is not Whole
        if not is_summed and _leaves_heads_cut(style) and next(module.parameters(), None) is not None:
            yield name, module, key


def _check_norms(model: nn.Module, styled: Styled) -> None:
    """A norm with a weight for each feature of all heads cannot stand behind a part of them."""
    for name, module, key in _norms_of_cut_heads(model, styled):
        path, _, leaf = name.rpartition(".")
        features = getattr(model.get_submodule(f"{path}.{NORMS[leaf]}"), "out_features", None)
        if next(module.parameters()).numel() == features:
            raise ValueError(
                f"tp_shard_plan: {name!r} has weights for all {features} features of the heads, and key {key!r} leaves "
                "each rank a part of them; use colwise_gather_output for the projections and rowwise_split_input "
                "behind attention, or leave attention out of the plan"
            )


def _warn_of_norms(model: nn.Module, styled: Styled) -> None:
    """Left out or replicated, a norm behind heads that are cut gets the gradient of this rank's heads alone."""
    for name, _, key in _norms_of_cut_heads(model, styled):
        said = "is replicate" if name in styled else "is not in the plan"
        warnings.warn(
            f"tp_shard_plan: {name!r} {said} while {key!r} cuts the heads before it, so its gradient "
            "is that of this rank's heads; add it as replicated_with_grad_allreduce",
            UserWarning,
            stacklevel=3,
        )
        return


Plan = Mapping[str, ParallelStyle]


def apply_plan(model: nn.Module, plan: Plan | None, tp_mesh: DeviceMesh) -> None:
    """Cut the modules that the plan names over a 1-D mesh, in place.

    Parameters become DTensors over tp, with the values of the mesh's first rank. What was one parameter under several
    names stays one, and what was frozen stays frozen; torch's styles give each name its own and thaw it.

    Cost:   1 scatter or broadcast for each parameter named, none on the meta device.
    Errors: those of `check_plan`, before anything is changed.
    """
    refuse(model, plan, tp_mesh)
    cut_modules(model, styled_modules(model, plan or {}), tp_mesh)


def cut_modules(model: nn.Module, styled: Mapping[str, tuple[str, ParallelStyle]], tp_mesh: DeviceMesh) -> None:
    """Cut some modules of a model, each by its style; ties and what is frozen as in `apply_plan`. Checks nothing."""
    ties = tied_names(model)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for name, (_, style) in styled.items():
        parallelize_module(model.get_submodule(name), tp_mesh, style)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen and parameter.requires_grad:
            parameter.requires_grad_(False)
    for first, *others in ties:
        _tie(model, first, others)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names that share one parameter, each in the model's order."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie(model: nn.Module, first: str, others: list[str]) -> None:
    shared = model.get_parameter(first)
    placements = shared.placements if isinstance(shared, DTensor) else None
    for name in others:
        owner, leaf = owner_of(model, name)
        own = owner.get_parameter(leaf)
        if own is shared:
            continue
        if (own.placements if isinstance(own, DTensor) else None) != placements:  # a style of the user's own
            raise ValueError(f"tp_shard_plan: {first!r} and {name!r} share a parameter and were cut in two ways")
        owner.register_parameter(leaf, shared)
