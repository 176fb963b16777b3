"""Where a model's parts are: its stack of layers, what comes before and after, and what every stage needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from torch_impl.pipelining.arguments import Number
from torch_impl.pipelining.partition import MULTIMODAL, generate_hf_model_fqn_per_model_part

NAME = "split_model_into_stages"


@dataclass(frozen=True)
class Anatomy:
    """Names of modules: `inner` has the layers, at `layers`; `first` stand before them, `last` after; `shared` have no
    parameters and go to every stage; of `first`, `idle` have none and are the first stage's all the same."""

    inner: str
    layers: str
    count: int
    first: tuple[str, ...]
    last: tuple[str, ...]
    shared: tuple[str, ...]
    idle: tuple[str, ...]

    @property
    def handed_through(self) -> tuple[str, ...]:
        """What a forward without these hands its input through, by its name beside the layers: what stands after
        them, and before them what has no parameters, as dropout."""
        prefix = f"{self.inner}." if self.inner else ""
        return tuple(name.removeprefix(prefix) for name in (*self.idle, *self.last) if name.startswith(prefix))

    @property
    def heads(self) -> tuple[str, ...]:
        """What stands after that module."""
        return tuple(name for name in self.last if self.inner and not name.startswith(f"{self.inner}."))

    def names(self, num_stages: int, embed_cost: Number, head_cost: Number) -> list[list[str]]:
        """Modules of each stage, layers cut as evenly as costs allow."""
        cut = generate_hf_model_fqn_per_model_part(
            num_stages, self.count, False, False, False, False, embed_cost=embed_cost, head_cost=head_cost
        )
        stages = [[f"{self.layers}.{name.rpartition('.')[2]}" for name in stage if ".layers." in name] for stage in cut]
        stages[0] = [*self.first, *stages[0]]
        stages[-1] += self.last
        return [[*stage, *self.shared] for stage in stages]


def anatomy_of(model: nn.Module) -> Anatomy:
    """By the model's own plan for pipelines where it has one, else by the names that transformers gives.

    Errors: ValueError for a model without a list of layers, or with one that nothing tells the ends of.
    """
    inner = _inner(model)
    module = model.get_submodule(inner)
    prefix = f"{inner}." if inner else ""
    planned = [name for name in _plan(module) if isinstance(getattr(module, name, None), nn.Module)]
    layers = next((name for name in planned if isinstance(getattr(module, name), nn.ModuleList)), "layers")
    if not isinstance(getattr(module, layers, None), nn.ModuleList):
        lists = [f"{prefix}{name}" for name, child in module.named_children() if isinstance(child, nn.ModuleList)]
        raise ValueError(
            f"pipelining.{NAME}: {type(model).__name__} has its layers in {' and '.join(map(repr, lists))}; what "
            f"stands before and after them is known of models that have them in {prefix + layers!r}, or a "
            "base_model_pp_plan"
        )
    before = planned[: planned.index(layers)] if layers in planned else ["embed_tokens"]
    after = planned[planned.index(layers) + 1 :] if layers in planned else ["norm", "lm_head"]
    children = dict(module.named_children())
    others = {name: child for name, child in children.items() if name not in {layers, *before, *after}}
    outer = {name: child for name, child in model.named_children() if inner and name != inner.partition(".")[0]}
    encoders = [f"{prefix}{name}" for name in others if name in MULTIMODAL]
    encoders += [name for name in outer if name in MULTIMODAL]
    heads = [name for name, child in outer.items() if name not in MULTIMODAL and _has_parameters(child)]
    return Anatomy(
        inner,
        f"{prefix}{layers}",
        len(getattr(module, layers)),
        tuple([*(f"{prefix}{name}" for name in before if hasattr(module, name)), *encoders]),
        tuple([*(f"{prefix}{name}" for name in after if hasattr(module, name)), *heads]),
        tuple(
            [f"{prefix}{name}" for name, child in others.items() if not _has_parameters(child)]
            + [name for name, child in outer.items() if not _has_parameters(child) and name not in MULTIMODAL]
        ),
        tuple(f"{prefix}{name}" for name in before if name in children and not _has_parameters(children[name])),
    )


def _inner(model: nn.Module) -> str:
    """The name of the first module, outermost first, that has a list of layers of its own."""
    found = [
        name.rpartition(".")[0]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not set(name.split(".")) & set(MULTIMODAL)
    ]
    if not found:
        raise ValueError(f"pipelining.{NAME}: {type(model).__name__} has no nn.ModuleList of layers to be cut")
    return min(found, key=lambda name: len(name.split(".")) if name else 0)


def _plan(module: nn.Module) -> list[str]:
    """Children in the order in which a forward runs them, as transformers says it."""
    plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or {}
    return [name for name in plan if "." not in name]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


HARMLESS = {*MULTIMODAL, "embed_tokens", "norm", "rotary_emb", "lm_head"}
ARGUMENT = "module_names_per_stage"


def check_names(model: nn.Module, parts: Anatomy, given: object) -> list[list[str]]:
    """Names as given, without those that the model has not, with what has no parameters and forward calls.

    Errors: TypeError; ValueError.
    """
    if not isinstance(given, (list, tuple)) or not all(isinstance(names, (list, tuple)) for names in given):
        raise TypeError(f"pipelining.{NAME}: {ARGUMENT} is a {type(given).__name__}; pass a list of lists of names")
    if not given:
        raise ValueError(f"pipelining.{NAME}: {ARGUMENT} is empty; pass the names of each stage")
    known = {name for name, _ in model.named_modules()}
    stages: list[list[str]] = []
    for stage, names in enumerate(given):
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"pipelining.{NAME}: {ARGUMENT}[{stage}] has {name!r}; pass names of modules")
            if name not in known and name.rpartition(".")[2] not in HARMLESS:
                raise ValueError(f"pipelining.{NAME}: {ARGUMENT}[{stage}] has {name!r}, no module of the model")
            if name.startswith(f"{parts.layers}.") and not name.removeprefix(f"{parts.layers}.").isdigit():
                raise ValueError(
                    f"pipelining.{NAME}: {ARGUMENT}[{stage}] has {name!r}, part of a layer; pass the layer"
                )
        stages.append([name for name in names if name in known])
    _check_layers(parts, stages)
    for ends, at, where in ((parts.first, 0, "first"), (parts.last, len(stages) - 1, "last")):
        for stage, names in enumerate(stages):
            for name in ends:
                if name in names and stage != at:
                    raise ValueError(
                        f"pipelining.{NAME}: {ARGUMENT}[{stage}] has {name!r}, which belongs to the {where} stage"
                    )
    needed = [(*parts.idle, *parts.shared), *[parts.shared] * (len(stages) - 1)]
    return [[*names, *(name for name in own if name not in names)] for names, own in zip(stages, needed, strict=True)]


def _check_layers(parts: Anatomy, stages: Sequence[Sequence[str]]) -> None:
    prefix = f"{parts.layers}."
    order = [int(name.removeprefix(prefix)) for names in stages for name in names if name.startswith(prefix)]
    if order != list(range(parts.count)):
        raise ValueError(
            f"pipelining.{NAME}: {ARGUMENT} has the layers {order}; they must be 0 to {parts.count - 1}, each once and "
            "in order"
        )


def check_parameters(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Each parameter is on one stage. Errors: ValueError."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        on = [stage for stage, names in enumerate(stages) if any(name.startswith(f"{each}.") for each in names)]
        if len(on) != 1:
            raise ValueError(
                f"pipelining.{NAME}: parameter {name!r} is on {f'stages {on}' if on else 'no stage'}; name its module "
                f"in one of {ARGUMENT}"
            )


def check_runs(
    model: nn.Module, parts: Anatomy, stages: Sequence[Sequence[str]], patch_inner: bool, patch_outer: bool
) -> None:
    """Each stage's forward finds what it calls. Errors: ValueError for a family that cannot be cut there."""
    config = getattr(model.get_submodule(parts.inner), "config", None)
    if len(stages) == 1 or config is None:
        return
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"pipelining.{NAME}: {type(model).__name__} shares keys and values across layers "
            f"(num_kv_shared_layers={config.num_kv_shared_layers}), which stages cannot; use one stage"
        )
    if getattr(config, "embedding_multiplier", 1) != 1:
        raise ValueError(
            f"pipelining.{NAME}: {type(model).__name__} scales what enters its layers "
            f"(embedding_multiplier={config.embedding_multiplier}), which every stage would do; use one stage"
        )
    for switch, on, module in (
        ("patch_inner_model", patch_inner, model.get_submodule(parts.inner)),
        ("patch_causal_lm_model", patch_outer or not parts.inner, model),
    ):
        if not on and type(module).__module__.startswith("transformers."):
            raise ValueError(
                f"pipelining.{NAME}: {switch}=False, but the forward of {type(module).__name__} calls modules that "
                "other stages have; pass True"
            )
