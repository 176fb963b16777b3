"""Spec strings: shape, sharding and gradient type of one tensor in one line.

`parse` reads one and reports each kind of mistake in its own sentence; the harness works with the resulting `Spec`.
Sizes do not matter here: whether a dim can be sharded is decided when sizes are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from string import ascii_uppercase
from typing import Any

from jax_ref.layouts import BUILTIN

LEADING = ("b", "s")  # the dims that `...` abbreviates
NO_TYPE = "shards no dim and has no type"
_SIZE = re.compile(r"[1-9][0-9]*")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_VALUE = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True)
class Sharding:
    """One sharding of a dim: the mesh axis and the layout of the shards."""

    axis: str
    layout: str = "contiguous"
    # ":contiguous" is optional; str() returns the text as written, and both forms are equal.
    explicit: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        return f"/{self.axis}" + (f":{self.layout}" if self.explicit or self.layout != "contiguous" else "")


@dataclass(frozen=True)
class Dim:
    """A dim and its shardings, outermost first; a number is a dim of that size, "g*q" merges the dims g and q."""

    name: str
    shardings: tuple[Sharding, ...] = ()

    def __str__(self) -> str:
        name = f"({' '.join(self.parts)})" if len(self.parts) > 1 else self.name
        return name + "".join(map(str, self.shardings))

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the dims merged here, usually one."""
        return tuple(self.name.split("*"))

    def size(self, sizes: Mapping[str, int]) -> int:
        return size_of(self.name, sizes)


@dataclass(frozen=True)
class Spec:
    """The dims of a tensor, in order, and the gradient type of each axis that shards no dim."""

    dims: tuple[Dim, ...] = ()
    types: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([*map(str, self.dims), *(f"{axis}={letter}" for axis, letter in self.types)])

    @property
    def dim_names(self) -> tuple[str, ...]:
        return tuple(dim.name for dim in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard a dim, in the order they are written."""
        return tuple(sharding.axis for dim in self.dims for sharding in dim.shardings)

    def type_of(self, axis: str) -> str:
        """V, R, I or P. An axis that neither shards nor has a type holds the same value on each rank: I."""
        return "V" if axis in self.axes else dict(self.types).get(axis, "I")


def size_of(name: str, sizes: Mapping[str, int]) -> int:
    """The size of a dim by its name, which may be a number."""
    return int(name) if name.isdigit() else sizes[name]


def parse(
    text: str,
    axes: tuple[str, ...],
    layouts: Collection[str] = BUILTIN,
    *,
    role: str = "input",
    name: str = "x",
    differentiable: bool = True,
    typeless_ok: bool = False,
    of_one_rank: Collection[str] = (),
) -> Spec:
    """Read the spec string of input or output `name` on a mesh with these axes.

    `differentiable=False` marks an integer or boolean, which has no gradient and so no types; `typeless_ok` marks a
    floating input that needs none because its gradient is not needed. An axis `of_one_rank` needs none either: all
    types mean the same on it.

    Errors: TypeError if `text` is not a string; ValueError, one sentence for each kind of mistake.
    """
    if not isinstance(text, str):
        kind = type(text).__name__
        article = "an" if kind[0] in "aeiou" else "a"
        raise TypeError(f"spec of {role} {name!r} is {article} {kind}; a spec is a string")
    try:
        spec = _read(text, axes, layouts)
        _check_types(spec, () if typeless_ok else [a for a in axes if a not in of_one_rank], name, differentiable)
    except ValueError as mistake:
        raise ValueError(f"spec '{text}' ({role} '{name}'): {mistake}") from None
    return spec


def _read(text: str, axes: tuple[str, ...], layouts: Collection[str]) -> Spec:
    if text.strip() == "?":
        raise ValueError(f"is left open; write its dims and which of them an axis shards, such as 'b s v/{axes[0]}'")
    dims: list[Dim] = []
    types: dict[str, str] = {}
    sharded_dim: dict[str, str] = {}
    for item in _items(text):
        if isinstance(item, Dim):
            if types:
                raise ValueError(f"dim '{item.name}' follows {_last(types)}; dims come first")
            if not item.name.isdigit() and any(set(item.parts) & set(dim.parts) for dim in dims):
                remedy = f"give the second its own letter and the same size, dims={{'letter': '{item.name}'}}"
                raise ValueError(f"dim '{item.name}' occurs twice; {remedy}")
            _check_shardings(item, axes, layouts, sharded_dim)
            dims.append(item)
        else:
            axis, letter = item
            _check_axis(axis, axes)
            _check_letter(axis, letter)
            if axis in sharded_dim:
                raise ValueError(
                    f"axis '{axis}' shards {sharded_dim[axis]} and is typed {axis}={letter}; "
                    f"a sharding axis is Varying, drop {axis}={letter}"
                )
            if axis in types:
                raise ValueError(f"axis '{axis}' is typed twice ({axis}={types[axis]}, {axis}={letter})")
            types[axis] = letter
    return Spec(tuple(dims), tuple(types.items()))


def _check_shardings(dim: Dim, axes: tuple[str, ...], layouts: Collection[str], sharded_dim: dict[str, str]) -> None:
    """Validate the shardings of one dim and record them in `sharded_dim`, axis to dim."""
    for sharding in dim.shardings:
        _check_axis(sharding.axis, axes)
        if sharding.layout not in layouts:
            names = ", ".join(sorted(layouts))
            raise ValueError(
                f"layout '{sharding.layout}' is not known ({names}); pass layouts={{'{sharding.layout}': f}}"
            )
        if sum(sharding.axis == other.axis for other in dim.shardings) > 1:
            raise ValueError(f"axis '{sharding.axis}' shards {dim.name} twice; an axis shards a dim once")
        if sharding.axis in sharded_dim:
            raise ValueError(
                f"axis '{sharding.axis}' shards both {sharded_dim[sharding.axis]} and {dim.name}; "
                "an axis shards one dim of a tensor"
            )
        sharded_dim[sharding.axis] = dim.name
    if len(dim.shardings) > 1 and any(sharding.layout == "packed" for sharding in dim.shardings):
        raise ValueError(f"packed must be the only sharding of dim {dim.name}")


def _check_axis(axis: str, axes: tuple[str, ...]) -> None:
    if axis in axes:
        return
    likeness = {candidate: SequenceMatcher(None, axis, candidate).ratio() for candidate in axes}
    nearest = max(likeness, key=likeness.__getitem__, default="")
    hint = f"; did you mean '{nearest}'?" if nearest and likeness[nearest] >= 0.5 else ""
    raise ValueError(f"axis '{axis}' is not in mesh ({', '.join(axes)}){hint}")


def _check_letter(axis: str, letter: str) -> None:
    if letter == "V":
        raise ValueError(f"{axis}=V: Varying is written by sharding a dim, as in v/{axis}")
    if letter not in ("R", "I", "P"):
        raise ValueError(f"{axis}={letter}: a type is R, I or P")


def _check_types(spec: Spec, axes: Collection[str], name: str, differentiable: bool) -> None:
    """Each of these axes shards a dim or has a type."""
    if not differentiable:
        for axis, letter in spec.types:
            raise ValueError(f"'{name}' is an integer and has no gradient; drop {axis}={letter}")
    for axis in axes if differentiable else ():
        if axis not in spec.axes and axis not in dict(spec.types):
            raise ValueError(
                f"axis '{axis}' {NO_TYPE}; write {axis}=R (gradients add up), "
                f"{axis}=I (same gradient) or {axis}=P (values add up)"
            )


def _last(types: dict[str, str]) -> str:
    axis = next(reversed(types))
    return f"{axis}={types[axis]}"


def _items(text: str) -> Iterator[Dim | tuple[str, str]]:
    """The words of the text in order: a Dim, or an axis and the text after its `=`."""
    for word in re.finditer(r"\([^()]*\)\S*|\S+", text):
        if word.group() == "...":
            yield from map(Dim, LEADING)
        else:
            yield _Word(text, word.start(), word.end()).item()


class _Word:
    """One word of a spec, read from left to right; errors name an unexpected character by its column."""

    def __init__(self, text: str, start: int, stop: int) -> None:
        self.text, self.start, self.stop, self.at = text, start, stop, start

    def item(self) -> Dim | tuple[str, str]:
        if size := _SIZE.match(self.text, self.at, self.stop):
            self.at = size.end()
            return self.dim(size.group())
        if self.take("("):
            return self.dim(self.group())
        name = self.name("a dim")
        if self.take("="):
            match = _VALUE.match(self.text, self.at, self.stop)
            if match:
                self.at = match.end()
            if not match or self.at < self.stop:
                raise self.unexpected("a type")
            return name, match.group()
        return self.dim(name)

    def group(self) -> str:
        """The names up to the closing bracket, merged."""
        names = []
        while not self.take(")"):
            if self.at == self.stop:
                raise ValueError(f"'{self.text[self.start : self.stop]}' has no closing bracket")
            names.append(self.name("a dim"))
            while self.take(" "):
                pass
        if len(names) < 2:
            raise ValueError(f"'({' '.join(names)})' groups no dims; write two or more, as in (g q)/tp")
        return "*".join(names)

    def dim(self, name: str) -> Dim:
        shardings = []
        while self.at < self.stop:
            if not self.take("/"):
                raise self.unexpected("a sharding")
            axis = self.name("an axis")
            explicit = self.take(":")
            shardings.append(Sharding(axis, self.name("a layout") if explicit else "contiguous", explicit))
        return Dim(name, tuple(shardings))

    def name(self, what: str) -> str:
        match = _NAME.match(self.text, self.at, self.stop)
        if not match:
            raise self.unexpected(what)
        self.at = match.end()
        # A capital inside a name is reported here; only the caller knows which characters may follow the name.
        if self.at < self.stop and self.text[self.at] in ascii_uppercase:
            raise self.unexpected(what)
        return match.group()

    def take(self, character: str) -> bool:
        if self.at < self.stop and self.text[self.at] == character:
            self.at += 1
            return True
        return False

    def unexpected(self, what: str) -> ValueError:
        if not self.text[self.at :].strip():
            return ValueError(f"ends after '{self.text[self.start : self.stop]}'; {what} must follow")
        character, column = self.text[self.at], self.at + 1
        if character in ascii_uppercase:
            return ValueError(f"'{character}' at column {column}: names are lower case")
        return ValueError(
            f"unexpected {character!r} at column {column}; a spec is dims, then axis=TYPE, separated by blanks"
        )


def placements(spec: Spec, axes: tuple[str, ...]) -> tuple[Any, ...]:
    """One placement for each mesh axis: Shard(dim), Partial() for P, Replicate() for R and I.

    Errors: ValueError, `not expressible: ...`, for a permuting layout, or a dim sharded twice against the order of the
    mesh.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    by_axis: dict[str, Any] = {axis: Partial() if letter == "P" else Replicate() for axis, letter in spec.types}
    for index, dim in enumerate(spec.dims):
        order = [axes.index(sharding.axis) for sharding in dim.shardings]
        if order != sorted(order):
            raise ValueError(f"not expressible: {dim} is sharded against the order of the mesh ({', '.join(axes)})")
        for sharding in dim.shardings:
            if sharding.layout == "ragged":
                raise ValueError(
                    "not expressible: ragged shards may have any lengths, DTensor's shards follow its ceil rule"
                )
            if sharding.layout != "contiguous":
                raise ValueError(f"not expressible: {sharding.layout} is a permutation")
            by_axis[sharding.axis] = Shard(index)
    return tuple(by_axis.get(axis, Replicate()) for axis in axes)
