"""Register parallelization strategies by model class, and import plans by path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any

from torch import nn

from torch_impl.contract import TypeProblem, contract, type_name

STRATEGIES: dict[str, Callable[..., nn.Module]] = {}


class ModelClassKind:
    """A class of modules, or its name."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, str) or (isinstance(value, type) and issubclass(value, nn.Module)):
            return None
        return TypeProblem(f"={value!r} is {type_name(value)}; pass a class of torch.nn.Module, or its name")


ModelClass = Annotated[type[nn.Module] | str, ModelClassKind()]


@contract
def register_parallel_strategy(name: ModelClass) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Decorate a function that parallelizes models of the class `name`, in place of `fsdp2_strategy_parallelize`.

        @register_parallel_strategy(name="WanTransformer3DModel")
        def parallelize_wan(model, device_mesh, **options): ...

    The function takes the arguments of `fsdp2_strategy_parallelize`, which it may call, and returns the model.

    Errors: TypeError if `name` is not a class of modules or a name, or if the decorated object is not a function.
    """
    class_name = class_name_of(name)

    def register(strategy: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        if not callable(strategy):
            raise TypeError(
                f"parallelizer.register_parallel_strategy: strategy={strategy!r} is {type_name(strategy)}; decorate a "
                "function of a model and a mesh"
            )
        STRATEGIES[class_name] = strategy
        return strategy

    return register


def registered_strategy(model: nn.Module) -> Callable[..., nn.Module] | None:
    """The strategy of the model's class, or of its nearest base class with one."""
    return next((STRATEGIES[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in STRATEGIES), None)


def imported_plan(path: str, model: nn.Module) -> Any:
    """Import the plan at "package.module:name" or "package.module.name": a dict, or the result of a function, which is
    called with the model if it has a parameter.

    Errors: ValueError for a path that names nothing. An ImportError raised inside an existing module passes through.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    begin = f"tp_shard_plan={path!r}"
    if module_name.startswith("."):
        raise ValueError(f"{begin} is relative, and there is no package to begin at; write 'package.module:NAME'")
    if not module_name or not name:
        raise ValueError(f"{begin} is not an import path; write 'package.module:NAME'")
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


def class_name_of(model_class: type[nn.Module] | str) -> str:
    """The name of a class of modules, given the class or its name."""
    return model_class if isinstance(model_class, str) else model_class.__name__
