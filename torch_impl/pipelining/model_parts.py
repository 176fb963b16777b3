"""Find a model's layers, the modules before and after them, and the modules that every stage needs; and check the
modules that a caller assigns to stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import nn

from torch_impl.contract import Instance, ListOf, Rejected
from torch_impl.pipelining.partition import MULTIMODAL, layer_counts

NAMES = ListOf(Instance(str, "pass a str"), "names")
StageNames = Annotated[list[list[str]], ListOf(NAMES, "lists of names", if_empty="pass the names of each stage")]


@dataclass(frozen=True)
class ModelParts:
    """The names of a model's modules, by their place. The module `inner` has `count` layers in the list `layers`.

    Modules `first` come before the layers, `last` after them. `shared` modules have no parameters and go to every
    stage. `parameterless` are the modules of `first` without parameters, such as dropout; they too are on the first
    stage only. `summands` are the modules of `first`, by their names in `inner`, that add their output to the
    embedding's, such as learned positions.
    """

    inner: str
    layers: str
    count: int
    first: tuple[str, ...]
    last: tuple[str, ...]
    shared: tuple[str, ...]
    parameterless: tuple[str, ...]
    summands: tuple[str, ...] = ()

    @property
    def skippable(self) -> tuple[str, ...]:
        """The modules of `inner`, by their names in it, that are replaced by the identity on all other stages."""
        prefix = f"{self.inner}." if self.inner else ""
        names = (*self.parameterless, *self.last)
        return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    @property
    def heads(self) -> tuple[str, ...]:
        """The modules after `inner`, such as the head."""
        return tuple(name for name in self.last if self.inner and not name.startswith(f"{self.inner}."))

    def names(self, num_stages: int, embed_cost: float, head_cost: float) -> list[list[str]]:
        """The names of each stage's modules, with layers divided as evenly as the costs allow.

        Errors: ValueError for more stages than layers.
        """
        if num_stages > self.count:
            excess = f"{num_stages} stages are more than the {self.count} layers of the model"
            raise Rejected(f"{excess}; use at most {self.count} stages")
        stages, start = [], 0
        for count in layer_counts(num_stages, self.count, embed_cost, head_cost):
            stages.append([f"{self.layers}.{layer}" for layer in range(start, start + count)])
            start += count
        stages[0] = [*self.first, *stages[0]]
        stages[-1] += self.last
        return [[*stage, *self.shared] for stage in stages]


# Families for which transformers has no pipeline plan, by the class of the module with the layers: its children in the
# order of the forward, and the children whose output is added to the embedding's.
PP_PLANS = {"GPT2Model": ("wte", "wpe", "drop", "h", "ln_f")}
SUMMANDS = {"GPT2Model": ("wpe",)}


def model_parts(model: nn.Module) -> ModelParts:
    """The parts of a model, by its pipeline plan if it has one, else by the names that transformers uses.

    Errors: ValueError for a model without a list of layers, or with unknown modules before and after it.
    """
    # 1. Find the list of layers, and the module that has it.
    inner = _inner(model)
    module = model.get_submodule(inner)
    prefix = f"{inner}." if inner else ""
    planned = [name for name in _plan(module) if isinstance(getattr(module, name, None), nn.Module)]
    layers = next((name for name in planned if isinstance(getattr(module, name), nn.ModuleList)), "layers")
    if not isinstance(getattr(module, layers, None), nn.ModuleList):
        lists = [f"{prefix}{name}" for name, child in module.named_children() if isinstance(child, nn.ModuleList)]
        place = f"{type(model).__name__} has its layers in {' and '.join(map(repr, lists))}"
        supported_models = f"models that have them in {prefix + layers!r}, or a base_model_pp_plan"
        raise Rejected(f"{place}; the modules before and after them are known only for {supported_models}")
    # 2. Find the modules before and after the layers, by the plan or else by name.
    before = planned[: planned.index(layers)] if layers in planned else ["embed_tokens"]
    after = planned[planned.index(layers) + 1 :] if layers in planned else ["norm", "lm_head"]
    # 3. Encoders of other modalities come first, modules with parameters outside `inner` last, and all other modules
    #    without parameters go to every stage.
    children = dict(module.named_children())
    siblings = {name: child for name, child in children.items() if name not in {layers, *before, *after}}
    outer = {name: child for name, child in model.named_children() if inner and name != inner.partition(".")[0]}
    encoders = [f"{prefix}{name}" for name in siblings if name in MULTIMODAL]
    encoders += [name for name in outer if name in MULTIMODAL]
    heads = [name for name, child in outer.items() if name not in MULTIMODAL and _has_parameters(child)]
    return ModelParts(
        inner,
        f"{prefix}{layers}",
        len(getattr(module, layers)),
        first=tuple([*(f"{prefix}{name}" for name in before if hasattr(module, name)), *encoders]),
        last=tuple([*(f"{prefix}{name}" for name in after if hasattr(module, name)), *heads]),
        shared=tuple(
            [f"{prefix}{name}" for name, child in siblings.items() if not _has_parameters(child)]
            + [name for name, child in outer.items() if not _has_parameters(child) and name not in MULTIMODAL]
        ),
        parameterless=tuple(
            f"{prefix}{name}" for name in before if name in children and not _has_parameters(children[name])
        ),
        summands=SUMMANDS.get(type(module).__name__, ()),
    )


def _inner(model: nn.Module) -> str:
    """The name of the outermost module that has a list of layers."""
    candidates = [
        name.rpartition(".")[0]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not set(name.split(".")) & set(MULTIMODAL)
    ]
    if not candidates:
        raise Rejected(f"{type(model).__name__} has no nn.ModuleList of layers to be split")
    # A list inside a layer, such as its experts, is nested deeper than the list of layers.
    return min(candidates, key=lambda name: len(name.split(".")) if name else 0)


def _plan(module: nn.Module) -> list[str]:
    """The children in the order of the forward, from the plan of transformers or from PP_PLANS."""
    plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or ()
    plan = plan or PP_PLANS.get(type(module).__name__, ())
    return [name for name in plan if "." not in name]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


# Names that a model may lack: `generate_hf_model_fqn_per_model_part` adds them for any model.
HARMLESS = {*MULTIMODAL, "embed_tokens", "norm", "rotary_emb", "lm_head"}
ARGUMENT = "module_names_per_stage"


def complete_names(
    model: nn.Module, parts: ModelParts, module_names_per_stage: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Drop the names that the model lacks, and add to each stage the modules without parameters that it needs.

    Errors: ValueError for a name that is not a module of the model or is part of a layer, for layers that are missing
            or out of order, for a first or last module on another stage.
    """
    modules = {name for name, _ in model.named_modules()}
    stages = [[name for name in names if name in modules] for names in module_names_per_stage]
    for problem in (*_name_problems(parts, modules, module_names_per_stage), *_assignment_problems(parts, stages)):
        raise Rejected(f"{ARGUMENT}{problem}")
    # Modules without parameters need not be named: the first stage gets the ones before the layers, all get the shared.
    needed = [(*parts.parameterless, *parts.shared), *[parts.shared] * (len(stages) - 1)]
    return [
        [*names, *(name for name in stage_needs if name not in names)]
        for names, stage_needs in zip(stages, needed, strict=True)
    ]


def _name_problems(parts: ModelParts, modules: set[str], stages: Sequence[Sequence[str]]) -> Iterator[str]:
    """Names that are neither modules of the model nor in HARMLESS, and names of parts of a layer."""
    for stage, names in enumerate(stages):
        for name in names:
            if name not in modules and name.rpartition(".")[2] not in HARMLESS:
                yield f"[{stage}] has {name!r}, no module of the model"
            if name.startswith(f"{parts.layers}.") and not name.removeprefix(f"{parts.layers}.").isdigit():
                yield f"[{stage}] has {name!r}, part of a layer; pass the layer"


def _assignment_problems(parts: ModelParts, stages: Sequence[Sequence[str]]) -> Iterator[str]:
    """Layers that are missing or out of order, and first or last modules on another stage."""
    prefix = f"{parts.layers}."
    order = [name.removeprefix(prefix) for names in stages for name in names if name.startswith(prefix)]
    if order != [str(layer) for layer in range(parts.count)]:
        yield f" has the layers [{', '.join(order)}]; they must be 0 to {parts.count - 1}, each once and in order"
    for names_of_end, end, where in ((parts.first, 0, "first"), (parts.last, len(stages) - 1, "last")):
        for stage, names in enumerate(stages):
            for name in names_of_end:
                if name in names and stage != end:
                    yield f"[{stage}] has {name!r}, which belongs to the {where} stage"


def split_problems(
    model: nn.Module, parts: ModelParts, stages: Sequence[Sequence[str]], patch_inner: bool, patch_outer: bool
) -> Iterator[str]:
    """Why a model cannot be split into these stages: parameters on no stage or two, forwards that need another stage.

    Stages run the forward of their transformers family. A few families do something once per model, such as scaling
    the embeddings, that every stage would repeat.
    """
    # 1. Each parameter must be on one stage.
    for name, _ in model.named_parameters(remove_duplicate=False):
        on = [stage for stage, names in enumerate(stages) if any(name.startswith(f"{each}.") for each in names)]
        if len(on) != 1:
            place = f"stages {on}" if on else "no stage"
            yield f"parameter {name!r} is on {place}; name its module in one of {ARGUMENT}"
    # 2. Each stage's forward must run without the modules of other stages.
    inner = model.get_submodule(parts.inner)
    config = getattr(inner, "config", None)
    if len(stages) == 1 or config is None:
        return
    if kv_shared := getattr(config, "num_kv_shared_layers", 0):
        shares = f"shares keys and values across layers (num_kv_shared_layers={kv_shared})"
        yield f"{type(model).__name__} {shares}, which stages cannot; use one stage"
    if (scale := getattr(config, "embedding_multiplier", 1)) != 1:
        scales = f"scales the input of its layers (embedding_multiplier={scale})"
        yield f"{type(model).__name__} {scales}, which every stage would do; use one stage"
    for switch, is_on, module in (
        ("patch_inner_model", patch_inner, inner),
        ("patch_causal_lm_model", patch_outer or not parts.inner, model),
    ):
        if not is_on and type(module).__module__.startswith("transformers."):
            calls = f"the forward of {type(module).__name__} calls modules that other stages have"
            yield f"{switch}=False, but {calls}; pass True"
