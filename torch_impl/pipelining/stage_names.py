"""What modules of stages must be: those of the model, each parameter on one stage, layers in order and whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torch_impl.pipelining.anatomy import NAME, Anatomy
from torch_impl.pipelining.module_names import MULTIMODAL

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
