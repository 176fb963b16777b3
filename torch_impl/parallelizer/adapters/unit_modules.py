"""Classes from their dotted paths, and the modules of a model that become units of their own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, List  # noqa: UP035  the page writes List

from torch import nn

NAME = "parallelizer.import_classes_from_paths"


def import_classes_from_paths(class_paths: List[str]) -> list[type]:  # noqa: UP006
    """The classes of `class_paths`, each "package.module.Class" or "package.module.Outer.Inner", in order; [] gives [].

    The module is the longest part of the path that can be imported.

    Errors: TypeError for what is not a list of strings; ValueError for a path without a dot, a module or an attribute
    that is not found, an object that is no class. An ImportError raised inside a module that was found passes through.
    """
    if isinstance(class_paths, str) or not isinstance(class_paths, list | tuple):
        raise TypeError(f"{NAME}: class_paths={class_paths!r} is a {type(class_paths).__name__}; pass a list of paths")
    for i, path in enumerate(class_paths):
        if not isinstance(path, str):
            raise TypeError(f"{NAME}: class_paths[{i}]={path!r} is a {type(path).__name__}; a path is a string")
    return [_imported(f"{NAME}: class_paths[{i}]={path!r}", path) for i, path in enumerate(class_paths)]


def _imported(said: str, path: str) -> type:
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{said}: is not the dotted path of a class, such as 'torch.nn.Linear'")
    found: Any = None
    length, missing = len(parts) - 1, None
    while length and found is None:
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not _is_of(error.name, parts[:length]):
                raise  # it was found, and something that it imports was not
            missing, length = missing or error, length - 1
    if found is None:
        raise ValueError(f"{said}: no module {parts[0]!r}; install it or mend the path") from missing
    return _attribute(said, found, parts[:length], parts[length:], missing)


def _is_of(missing: str | None, parts: list[str]) -> bool:
    """Whether the module that was not found is the one sought, or a package around it."""
    return missing in {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def _attribute(said: str, module: Any, path: list[str], names: list[str], missing: BaseException | None) -> type:
    found = module
    for i, name in enumerate(names):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            holder = ".".join([*path, *names[:i]])
            kind = "class" if i else "module"
            near = get_close_matches(name, dir(found), n=1, cutoff=0.0)
            nearest = f"; nearest: {near[0]!r}" if near else ""
            raise ValueError(f"{said}: {kind} {holder!r} has no attribute {name!r}{nearest}") from missing or error
    if not isinstance(found, type):
        raise ValueError(f"{said}: is a {type(found).__name__}, not a class")
    return found


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
