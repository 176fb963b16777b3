"""What is registered for a model by its class: plans where its own is missing or wrong, strategies; plans by path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn

from torch_impl.contract import type_name

Entry = str | Callable[[], Any] | None  # the name of a style, a function that makes one, or no style
PlanEntries = Mapping[str, Entry]
ModelClass = type[nn.Module] | str
NAME = "parallelizer"

# By the name of a class, so that transformers is not imported; subclasses have the same. Keys are names in that class.
TP_PLANS: dict[str, PlanEntries] = {
    "GPT2Model": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "conv1d_packed_colwise",
        "h.*.attn.c_proj": "conv1d_rowwise",
        "h.*.mlp.c_fc": "conv1d_colwise",
        "h.*.mlp.c_proj": "conv1d_rowwise",
    },
    "GPT2LMHeadModel": {"lm_head": "colwise_gather_output"},
    # The activation between sharded layers has parameters, whose gradient is a sum over the ranks: 5.23 leaves it out.
    "ApertusModel": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
}
STRATEGIES: dict[str, Callable[..., nn.Module]] = {}


def register_tp_plan(model_class: ModelClass, plan: PlanEntries) -> None:
    """Set the entries of a class's tensor-parallel plan that win over those of its model and config.

    `model_class` is the class, or its name; subclasses have the entries too, and a class inside another model, as the
    decoder of a causal model, has them under its place there. A value is the name of a style, a function that makes a
    style, or None for an entry to be left out. A second call for a class replaces the first.

    Errors: TypeError for a class, key or value of another kind.
    """
    name = _class_name("register_tp_plan", model_class)
    if not isinstance(plan, Mapping):
        raise TypeError(f"{NAME}.register_tp_plan: plan is {type_name(plan)}; pass a dict of module name -> style")
    for key, entry in plan.items():
        if not isinstance(key, str) or not (entry is None or isinstance(entry, str) or callable(entry)):
            raise TypeError(
                f"{NAME}.register_tp_plan: plan[{key!r}] is {entry!r}; pass the name of a style, a function that makes "
                "one, or None"
            )
    TP_PLANS[name] = dict(plan)


def registered_tp_plan(model: nn.Module) -> dict[str, Entry]:
    """The registered entries of a model's class and of the classes that it inherits from; the nearest wins."""
    entries: dict[str, Entry] = {}
    for cls in reversed(type(model).__mro__):
        entries |= TP_PLANS.get(cls.__name__, {})
    return entries


def register_parallel_strategy(name: ModelClass) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """A decorator: the function parallelizes models of a class, in place of `fsdp2_strategy_parallelize`.

        @register_parallel_strategy(name="WanTransformer3DModel")
        def parallelize_wan(model, device_mesh, **options): ...

    It takes the arguments of `fsdp2_strategy_parallelize`, which it may call, and returns the model.

    Errors: TypeError for what is no class, name or function.
    """
    class_name = _class_name("register_parallel_strategy", name)

    def register(strategy: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        if not callable(strategy):
            raise TypeError(f"{NAME}.register_parallel_strategy: {strategy!r} is no function of a model and a mesh")
        STRATEGIES[class_name] = strategy
        return strategy

    return register


def registered_strategy(model: nn.Module) -> Callable[..., nn.Module] | None:
    """The strategy of the model's class, or of the nearest class that it inherits from."""
    return next((STRATEGIES[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in STRATEGIES), None)


def imported_plan(path: str, model: nn.Module) -> Any:
    """The plan at "package.module:name" or "package.module.name": a dict, or what a function of no argument or of the
    model returns.

    Errors: ValueError for a path that names nothing. An ImportError raised inside an existing module passes through.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    begin = f"tp_shard_plan={path!r}"
    if not module_name or not name:
        raise ValueError(f"{begin} is no import path; write 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and something that it imports does not
        raise ValueError(f"{begin}: no module {error.name!r}; install it or correct the path") from error
    if not hasattr(module, name):
        nearest = get_close_matches(name, dir(module), n=1, cutoff=0.0)
        raise ValueError(f"{begin}: {module_name!r} has no {name!r}; nearest: {', '.join(map(repr, nearest))}")
    plan = getattr(module, name)
    if not callable(plan):
        return plan
    return plan(model) if inspect.signature(plan).parameters else plan()


def _class_name(function: str, model_class: ModelClass) -> str:
    name = model_class.__name__ if isinstance(model_class, type) else model_class
    if not isinstance(name, str):
        raise TypeError(f"{NAME}.{function}: {model_class!r} is neither a class nor the name of one")
    return name
