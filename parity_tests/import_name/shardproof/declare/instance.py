"""Check whether the specs of a scheme are an instance of a contract's specs.

A contract is general: `...` stands for any dims, a scheme may use other letters for dims, and an axis is the name of a
group argument. A scheme is specific: `logits "b s v/tp:ragged"` is an instance of `vocab_parallel_logits "... v/tp"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_impl.contract import Contract

LEADING = "..."
TRAILING = "... at the end"  # the key of a `...` that follows other dims
_WORD = re.compile(r"\([^)]*\)\S*|\S+")


@dataclass(frozen=True)
class Meaning:
    """A translation of a contract's words into a scheme's: the dims for each letter and `...`, the axes for an axis.

    An axis becomes several axes if the scheme shards over each in turn, and no axis if its mesh does not have it.
    """

    dims: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def with_dim(self, name: str, value: Any) -> Meaning | None:
        """Add a dim; None if the name already stands for another dim."""
        return Meaning({**self.dims, name: value}, self.axes) if self.dims.get(name, value) == value else None

    def further_axes(self) -> set[str]:
        """The axes that shard the scheme's dims in addition to the contract's axes."""
        return {axis for name, value in self.dims.items() if not name.startswith(LEADING) for axis in value[1]}

    def with_axis(self, name: str, value: tuple[str, ...]) -> Meaning | None:
        """Add an axis; None if the name already stands for other axes."""
        return Meaning(self.dims, {**self.axes, name: value}) if self.axes.get(name, value) == value else None


def meaning_of(
    general: Contract, inputs: Mapping[str, str], outputs: Sequence[str] | None, axes: Sequence[str]
) -> Meaning | None:
    """A meaning that turns the contract's inputs and outputs into the scheme's, on these axes; None if there is none.

    Every required tensor of the contract is an input of the scheme, by its name or by its order. The scheme may have
    further inputs, such as the offsets for its layout. The outputs match one form of the contract's result; with None
    they are not compared.
    """
    # A contract's axis may be absent only if the contract has every axis of the mesh by name, such as cp alone.
    absent = general.axes - set(axes) if set(axes) <= general.axes else set()
    for paired in _pairings(general.routes, general.required, inputs, Meaning(), axes):
        for form in general.outputs if outputs is not None and general.outputs else ((),):
            if not form or len(form) == len(outputs or ()):
                for meaning in _all(list(zip(form, outputs or (), strict=False)), paired, axes):
                    further, none = meaning.further_axes(), {name for name, own in meaning.axes.items() if not own}
                    if not further & general.axes and none <= absent:
                        return meaning
    return None


def instance_of(general: str, meaning: Meaning) -> str:
    """Write a contract's spec in a scheme's words: `... tp=I` as `b s tp=I`. Layouts are the default layouts."""
    words: list[str] = []
    dims, types = _read(general)
    for i, dim in enumerate(dims):
        if dim == LEADING:
            words += meaning.dims.get(TRAILING if i else LEADING, (LEADING,))
            continue
        name, *shardings = dim.split("/")
        own_name, further = meaning.dims.get(name, (name, ()))
        axes = [each for axis in shardings for each in meaning.axes.get(axis, (axis,))]
        words.append("/".join([own_name, *further, *axes]))
    for axis, letter in types.items():
        words += [f"{each}={letter}" for each in meaning.axes.get(axis, (axis,))]
    return " ".join(words)


def _pairings(
    general: Mapping[str, Sequence[str]],
    required: Sequence[str],
    inputs: Mapping[str, str],
    meaning: Meaning,
    axes: Sequence[str],
) -> Iterator[Meaning]:
    """Yield the meanings for each pairing of the contract's arguments with the scheme's inputs."""
    if not general:
        yield meaning
        return
    (name, routes), *rest = general.items()
    candidates = [name] if name in inputs else [each for each in inputs if each not in general]
    for candidate in candidates:
        left = {each: text for each, text in inputs.items() if each != candidate}
        for route in routes:
            for more in _instances(route, inputs[candidate], meaning, axes):
                yield from _pairings(dict(rest), required, left, more, axes)
    if name not in inputs and name not in required:
        yield from _pairings(dict(rest), required, inputs, meaning, axes)


def _all(pairs: list[tuple[str, str]], meaning: Meaning, axes: Sequence[str]) -> Iterator[Meaning]:
    if not pairs:
        yield meaning
        return
    for more in _instances(*pairs[0], meaning, axes):
        yield from _all(pairs[1:], more, axes)


def _instances(general: str, spec: str, meaning: Meaning, axes: Sequence[str]) -> Iterator[Meaning]:
    """Yield the meanings that turn a contract's spec into a scheme's spec."""
    general_dims, general_types = _read(general)
    dims, types = _read(spec)
    for more in _dims(general_dims, dims, meaning):
        yield from _types(list(general_types.items()), types, more, axes)


def _read(spec: str) -> tuple[list[str], dict[str, str]]:
    """The dims of a spec as written, and the gradient type of each axis."""
    words = _WORD.findall(spec)
    types = dict(word.split("=") for word in words if "=" in word)
    return [word for word in words if "=" not in word], types


def _dims(general: list[str], dims: list[str], meaning: Meaning, ellipsis: str = LEADING) -> Iterator[Meaning]:
    if not general:
        if not dims:
            yield meaning
        return
    if general[0] == LEADING:
        for count in range(len(dims) + 1):
            if (more := meaning.with_dim(ellipsis, tuple(dims[:count]))) is not None:
                yield from _dims(general[1:], dims[count:], more, TRAILING)
        return
    # A scheme may write `2f` as one dim, or as two dims with the first of size 2: `two f`.
    for own in (dims[:1], [" ".join(dims[:2])] if general[0][0].isdigit() and len(dims) > 1 else []):
        for each in own:
            if (more := _dim(general[0], each, meaning)) is not None:
                yield from _dims(general[1:], dims[len(each.split()) :], more, TRAILING)


def _dim(general: str, dim: str, meaning: Meaning) -> Meaning | None:
    """Add a dim that is sharded according to the contract; None if it does not fit.

    The scheme may shard it over further axes that the contract does not have, such as the rows of a batch over dp.
    """
    name, *stated = general.split("/")
    own_name, *own = dim.split("/")
    shares, further = _shares(stated, own)
    for sharding, share in zip(stated, shares, strict=True):
        axis, _, layout = sharding.partition(":")
        own_layouts = {each.partition(":")[2] or "contiguous" for each in share}
        if layout and not layout.isupper() and own_layouts - {layout}:
            return None
        more = meaning.with_axis(axis, tuple(each.partition(":")[0] for each in share))
        if more is None:
            return None
        meaning = more
    if name.isdigit():
        return meaning if name == own_name and not further else None
    return meaning.with_dim(name, (own_name, further))


def _shares(stated: list[str], own: list[str]) -> tuple[list[list[str]], tuple[str, ...]]:
    """The scheme's shardings for each stated sharding of a dim, and the axes of the remaining shardings."""
    axes = [each.partition(":")[0] for each in own]
    names = [each.partition(":")[0] for each in stated]
    if len(stated) == 1 and names[0] not in axes:  # one axis of a contract may be several of a mesh, or none
        return [own], ()
    if len(stated) == len(own) and not set(names) & set(axes):
        return [[each] for each in own], ()
    shares = [[own[axes.index(name)]] if name in axes else [] for name in names]
    return shares, tuple(axis for axis in axes if axis not in names)


def _types(
    stated: list[tuple[str, str]], types: Mapping[str, str], meaning: Meaning, axes: Sequence[str]
) -> Iterator[Meaning]:
    """Yield the meanings under which the spec has every stated type; it may have types on further axes."""
    if not stated:
        yield meaning
        return
    (axis, letter), *rest = stated
    # An axis that shards no input becomes the axis of the same name, else any axis with a type, else no axis.
    others = [(axis,)] if axis in axes else [*((each,) for each in types), ()]
    for candidate in [meaning.axes[axis]] if axis in meaning.axes else others:
        if all(types.get(each, letter) == letter for each in candidate):
            more = meaning.with_axis(axis, candidate)
            if more is not None:
                yield from _types(rest, types, more, axes)
