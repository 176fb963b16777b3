"""The keys of a plan: dotted names of modules, in which a part may have wildcards, as `*` for each layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

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
