"""The names that a function has, and the kinds of their values, which decide which name may replace another."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

NUMBERS = ("tensor of floats", "tensor of integers", "int", "float")  # kinds that can be multiplied
FACTORS = ("floats", "flags")  # kinds of tensors
MOST_NAMES = 6  # of the same kind that are tried for a name


@dataclass(frozen=True)
class Names:
    """What a function's names hold; in its file, the attributes read of a name and the strings given to a keyword."""

    kinds: Mapping[str, str]
    attributes: Mapping[str, set[str]]
    strings: Mapping[str, set[str]]
    axes: tuple[str, ...]
    sharded_dims: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()  # that the function takes or assigns and never reads

    def alike(self, name: str) -> list[str]:
        """Other names of the same kind, fields of one object first."""
        kind, base = self.kinds.get(name), name.partition(".")[0]
        others = [each for each, other in self.kinds.items() if other == kind and each != name] if kind else []
        return sorted(others, key=lambda other: other.partition(".")[0] != base)[:MOST_NAMES]

    def numbers(self, *kinds: str) -> list[str]:
        """Names of these kinds of numbers, local ones first, and the rank and the size of groups."""
        named = sorted((name for name, kind in self.kinds.items() if kind in kinds), key=lambda name: "." in name)
        groups = [name for name, kind in self.kinds.items() if kind == "group"]
        return [*named[:MOST_NAMES], *(f"{group}.{call}()" for group in groups[:2] for call in ("rank", "size"))]

    def sizes(self) -> list[str]:
        """Calls that return the number of ranks in a group, or along an axis of a scheme's mesh."""
        return [each.replace(".rank(", ".size(") for each in self.ranks()]

    def ranks(self) -> list[str]:
        """Calls that return the rank in a group, or along an axis of a scheme's mesh."""
        of_groups = [f"{name}.rank()" for name, kind in self.kinds.items() if kind == "group"]
        meshes = [name for name, kind in self.kinds.items() if kind == "mesh"]
        return [*of_groups[:2], *(f"{name}.rank({axis!r})" for name in meshes for axis in self.axes)]

    def positions(self) -> list[str]:
        """Calls that return the positions that a rank holds of a sharded dim."""
        meshes = [name for name, kind in self.kinds.items() if kind == "mesh"]
        return [f"{name}.global_ids({dim!r})" for name in meshes for dim in self.sharded_dims]

    def numbers_of_rows(self, name: str) -> list[str]:
        """Tensors with a number for each row of another one."""
        what, _, dims = self.kinds.get(name, "").partition(", ")
        of_rows = f"{what}, {int(dims or 0) - 1}"
        return [each for each, kind in self.kinds.items() if dims and kind == of_rows and "." not in each][:MOST_NAMES]

    def factors(self, name: str) -> list[str]:
        """Tensors that may scale or mask another one: of as many dims, or of one less."""
        _, _, dims = self.kinds.get(name, "").partition(", ")
        fitting = {f"tensor of {what}, {dims}": "" for what in FACTORS}
        fitting |= {f"tensor of {what}, {int(dims or 0) - 1}": "[..., None]" for what in FACTORS}
        named = ((each, fitting.get(kind)) for each, kind in self.kinds.items() if each != name and "." not in each)
        return [f"{each}{ending}" for each, ending in named if ending is not None and dims]


def parsed(text: str) -> ast.expr:
    """A name, a field of one, or a call: `rank`, `self.rank`, `group.rank()`."""
    return ast.parse(text, mode="eval").body
