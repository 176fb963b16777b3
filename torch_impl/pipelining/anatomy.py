"""Where a model's parts are: its stack of layers, what comes before and after, and what every stage needs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torch_impl.pipelining.arguments import Number
from torch_impl.pipelining.module_names import MULTIMODAL, generate_hf_model_fqn_per_model_part

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
