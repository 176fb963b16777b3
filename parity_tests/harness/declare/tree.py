"""Trees of parameters, and the same by the paths of their leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """`{"norm": {"weight": x}}` as `{"norm.weight": x}`."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return leaves


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`{"norm.weight": x}` as `{"norm": {"weight": x}}`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split(".")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[name] = leaf
    return tree
