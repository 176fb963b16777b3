"""Match keys to names of modules, and find the names nearest to a key that matches nothing.

A key is the dotted name of a module; each part may have wildcards, such as `*` for every layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def names_of(key: str, names: Iterable[str]) -> list[str]:
    """The names that match a key: they have as many dotted parts as the key, and each part matches."""
    pattern = key.split(".")
    return [name for name in names if matches(pattern, name.split("."))]


def generic(name: str) -> str:
    """A module's name with `*` for its layer's number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def matches(pattern: list[str], parts: list[str]) -> bool:
    """Whether a name has as many parts as a key, and each part matches the key's part."""
    return len(pattern) == len(parts) and all(map(fnmatchcase, parts, pattern))


def nearest_names(key: str, names: Iterable[str]) -> str:
    """The two names most similar to a key, with `*` for layers."""
    patterns = list(dict.fromkeys(generic(name) for name in names if name))
    return ", ".join(repr(name) for name in get_close_matches(key, patterns, n=2, cutoff=0.0)) or "none"
