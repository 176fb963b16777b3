"""Import classes by dotted path, and find the modules of a model that become FSDP units."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, List  # noqa: UP035  the page writes List

from torch import nn

from torch_impl.contract import Instance, ListOf, contract

ClassPaths = Annotated[List[str], ListOf(Instance(str, "a path is a string"), "paths")]  # noqa: UP006


@contract
def import_classes_from_paths(class_paths: ClassPaths) -> list[type]:
    """Import the classes of `class_paths`, each "package.module.Class" or "package.module.Outer.Inner", in order.

    The module is the longest part of the path that can be imported. [] gives [].

    Errors: TypeError unless class_paths is a list of strings; ValueError for a path without a dot, a module or an
    attribute that does not exist, or an object that is not a class. An ImportError raised inside an existing module
    passes through.
    """
    return import_classes("parallelizer.import_classes_from_paths: class_paths", class_paths)


def import_classes(begin: str, paths: Sequence[str]) -> list[type]:
    """Import classes by path; `begin` names the argument in messages. Errors: ValueError as above."""
    return [_import_class(f"{begin}[{i}]={path!r}", path) for i, path in enumerate(paths)]


def unit_instances(model: nn.Module, classes: Sequence[type], paths: Sequence[str]) -> list[nn.Module]:
    """The instances of the classes in the model's order, without instances inside another instance.

    Errors: ValueError for a class without an instance, by its path.
    """
    modules = list(model.modules())
    for cls, path in zip(classes, paths, strict=True):
        if not any(isinstance(module, cls) for module in modules):
            present = ", ".join(sorted({type(module).__name__ for module in modules}))
            raise ValueError(
                f"nvfsdp_unit_modules: {type(model).__name__} has no instance of {path!r}; it has {present}"
            )
    outermost: list[nn.Module] = []
    covered: set[int] = set()
    # A module comes before the modules inside it, so an inner instance is already covered when it is reached.
    for module in modules:
        if isinstance(module, tuple(classes)) and id(module) not in covered:
            outermost.append(module)
            covered |= {id(inner) for inner in module.modules()}
    return outermost


def parameter_owners(model: nn.Module) -> list[nn.Module]:
    """Every module below the root that has parameters of its own, in the model's order.

    Errors: ValueError for a parameter that two of them share.
    """
    # A module's parameter table may contain only None, as in a LayerNorm without weights.
    named = [(name, module) for name, module in model.named_modules() if name and module._parameters]
    owners = [(name, module) for name, module in named if next(module.parameters(recurse=False), None) is not None]
    first_names: dict[int, str] = {}
    for name, module in owners:
        for leaf, parameter in module.named_parameters(recurse=False):
            first = first_names.setdefault(id(parameter), f"{name}.{leaf}")
            if first != f"{name}.{leaf}":
                raise ValueError(
                    f"disable_bucketing=True makes a unit of each module, and {first!r} and {f'{name}.{leaf}'!r} share "
                    "a parameter; untie them, or pass disable_bucketing=False"
                )
    return [module for _, module in owners]


def _import_class(begin: str, path: str) -> type:
    """Import the class at a path; `begin` begins the error messages."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{begin}: is not the dotted path of a class, such as 'torch.nn.Linear'")
    # The module is the longest part that can be imported; the rest are attributes.
    module: Any = None
    length, missing = len(parts) - 1, None
    while length and module is None:
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not _is_part_of(error.name, parts[:length]):
                raise  # the module exists, and something that it imports does not
            missing, length = missing or error, length - 1
    if module is None:
        raise ValueError(f"{begin}: no module {parts[0]!r}; install it or correct the path") from missing
    return _attribute(begin, module, parts[:length], parts[length:], missing)


def _is_part_of(missing: str | None, parts: list[str]) -> bool:
    """Whether the missing module is the path's module, or a package around it."""
    return missing in {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


def _attribute(begin: str, module: Any, path: list[str], names: list[str], missing: BaseException | None) -> type:
    value = module
    for i, name in enumerate(names):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            owner = ".".join([*path, *names[:i]])
            kind = "class" if i else "module"
            matches = get_close_matches(name, dir(value), n=1, cutoff=0.0)
            nearest = f"; nearest: {matches[0]!r}" if matches else ""
            # If the path has more packages than could be imported, the failed import is the cause, not the attribute.
            raise ValueError(f"{begin}: {kind} {owner!r} has no attribute {name!r}{nearest}") from missing or error
    if not isinstance(value, type):
        raise ValueError(f"{begin}: is a {type(value).__name__}, not a class")
    return value
