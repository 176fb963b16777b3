"""Which modules become units of their own: instances of the classes that were named."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def instances(model: nn.Module, classes: Sequence[type], paths: Sequence[str]) -> list[nn.Module]:
    """Instances of the classes in the model's order; one inside another is left to the outer.

    Errors: ValueError for a class without an instance, by its path.
    """
    modules = list(model.modules())
    for cls, path in zip(classes, paths, strict=True):
        if not any(isinstance(module, cls) for module in modules):
            raise ValueError(
                f"nvfsdp_unit_modules: {type(model).__name__} has no instance of {path!r}; it has "
                f"{', '.join(sorted({type(module).__name__ for module in modules}))}"
            )
    found: list[nn.Module] = []
    covered: set[int] = set()
    for module in modules:
        if isinstance(module, tuple(classes)) and id(module) not in covered:
            found.append(module)
            covered |= {id(inner) for inner in module.modules()}
    return found


def owners(model: nn.Module) -> list[nn.Module]:
    """Every module below the root that has parameters itself, in the model's order.

    Errors: ValueError for a parameter that two of them share, or one whose owner contains another owner.
    """
    named = [(name, each) for name, each in model.named_modules() if name and each._parameters]
    found = [(name, module) for name, module in named if next(module.parameters(recurse=False), None) is not None]
    first: dict[int, str] = {}
    for name, module in found:
        for leaf, parameter in module.named_parameters(recurse=False):
            other = first.setdefault(id(parameter), f"{name}.{leaf}")
            if other != f"{name}.{leaf}":
                raise ValueError(
                    f"disable_bucketing=True makes a unit of each module, and {other!r} and {f'{name}.{leaf}'!r} share "
                    "a parameter; untie them, or keep the buckets"
                )
    return [module for _, module in found]
