"""Whether the specs of a scheme are an instance of those of a contract.

A contract is general: `...` are any dims, a dim is a letter that a scheme may write otherwise, an axis is the argument
of a group. A scheme says which: `logits "b s v/tp:ragged"` is an instance of `vocab_parallel_logits "... v/tp"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_impl.contract import Contract

LEADING = "..."
TRAILING = "... at the end"  # what a meaning calls the `...` behind other dims
_WORD = re.compile(r"\([^)]*\)\S*|\S+")


@dataclass(frozen=True)
class Meaning:
    """What a scheme means by the words of a contract: the dims of each letter and of `...`, the axes of each axis.

    An axis means several where a scheme shards over each of them in turn, and none where its mesh has no such axis.
    """

    dims: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def with_dim(self, name: str, value: Any) -> Meaning | None:
        """With one dim more; None if the name means another already."""
        return Meaning({**self.dims, name: value}, self.axes) if self.dims.get(name, value) == value else None

    def further_axes(self) -> set[str]:
        """The axes that shard dims beyond the contract's own."""
        return {axis for name, value in self.dims.items() if not name.startswith(LEADING) for axis in value[1]}

    def with_axis(self, name: str, value: tuple[str, ...]) -> Meaning | None:
        """With one axis more; None if the name means another already."""
        return Meaning(self.dims, {**self.axes, name: value}) if self.axes.get(name, value) == value else None


def meaning_of(
    general: Contract, inputs: Mapping[str, str], outputs: Sequence[str] | None, axes: Sequence[str]
) -> Meaning | None:
    """A meaning under which the inputs and outputs of a scheme on these axes are those of a contract; None without one.

    Every tensor that a call must pass is an input of the scheme, by its name or in the order of both. A scheme may have
    further inputs, as the offsets that its layout is made of. The outputs are one of the forms of the result;
    with None they are not compared.
    """
    # An axis means none of the mesh only where all of the mesh are known by their names, as cp alone without tp.
    absent = general.axes - set(axes) if set(axes) <= general.axes else set()
    for of_inputs in _pairings(general.routes, general.required, inputs, Meaning(), axes):
        for form in general.outputs if outputs is not None and general.outputs else ((),):
            if not form or len(form) == len(outputs or ()):
                for meaning in _all(list(zip(form, outputs or (), strict=False)), of_inputs, axes):
                    further, none = meaning.further_axes(), {name for name, own in meaning.axes.items() if not own}
                    if not further & general.axes and none <= absent:
                        return meaning
    return None


def instance_of(general: str, meaning: Meaning) -> str:
    """A spec of a contract in the words of a scheme: `... tp=I` as `b s tp=I`. Layouts are the default ones."""
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
    """The meanings for each way to pair the arguments of a contract with inputs of a scheme."""
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
    """The meanings under which a spec of a scheme is one of a contract."""
    general_dims, general_types = _read(general)
    dims, types = _read(spec)
    for more in _dims(general_dims, dims, meaning):
        yield from _types(list(general_types.items()), types, more, axes)


def _read(spec: str) -> tuple[list[str], dict[str, str]]:
    """The dims of a spec, as they are written, and the gradient type on each axis."""
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
    # `2f` may be written as one dim or as two, of which the first has that size: `two f`.
    for own in (dims[:1], [" ".join(dims[:2])] if general[0][0].isdigit() and len(dims) > 1 else []):
        for each in own:
            if (more := _dim(general[0], each, meaning)) is not None:
                yield from _dims(general[1:], dims[len(each.split()) :], more, TRAILING)


def _dim(general: str, dim: str, meaning: Meaning) -> Meaning | None:
    """The meaning with one dim more, sharded as the contract says.

    It may be sharded over further axes, which the contract does not know: rows of a batch over dp.
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
    """The shardings of a scheme's dim that each stated one means, and the axes of all others."""
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
    """Each stated type is that of the spec on the same axis; the spec may have types on further axes."""
    if not stated:
        yield meaning
        return
    (axis, letter), *rest = stated
    # An axis that shards no input: the one of the same name, else any with the stated type, else none.
    others = [(axis,)] if axis in axes else [*((each,) for each in types), ()]
    for candidate in [meaning.axes[axis]] if axis in meaning.axes else others:
        if all(types.get(each, letter) == letter for each in candidate):
            more = meaning.with_axis(axis, candidate)
            if more is not None:
                yield from _types(rest, types, more, axes)
