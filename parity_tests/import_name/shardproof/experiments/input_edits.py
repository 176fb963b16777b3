"""Small edits of a reference's inputs: a number that an input is multiplied by, another order along one dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared
from shardproof.engines.stitch import owners

IN_ANY_ORDER = ("float", "ids", "mask", "integers")  # kinds of draws with values that are valid in any order
POWERS = ((1.0, "{}"), (-1.0, "1/{}"), (0.5, "sqrt({})"), (-0.5, "1/sqrt({})"))
COUNTED = {0.5: ": its squares are counted {} times", 1.0: ": it is counted {} times"}
BLOCKS = (2, 3, 4)  # blocks of a fused projection or of a rotation
LARGEST_BLOCK = 16
EXCHANGED = "exchanged"
NEXT, PREVIOUS, FIRST = "the next", "the previous", "the first"  # rank's shard


@dataclass(frozen=True)
class Change:
    """Another value of an input: `picks` of its places along `axis`, times `factor`, plus `addend`."""

    axis: int = 0
    picks: np.ndarray | None = None
    factor: float = 1.0
    addend: float = 0.0

    def of(self, x: np.ndarray) -> np.ndarray:
        picked = x if self.picks is None else x.take(self.picks, self.axis)
        return picked if (self.factor, self.addend) == (1.0, 0.0) else picked * self.factor + self.addend

    @property
    def key(self) -> tuple[int, bytes | None, float, float]:
        """Equal for equal changes."""
        return self.axis, None if self.picks is None else self.picks.tobytes(), self.factor, self.addend

    def back(self, gradient: np.ndarray) -> np.ndarray:
        """The gradient of the input, from the gradient of its other value."""
        own = gradient * self.factor
        if self.picks is None:
            return own
        total = np.zeros_like(own)
        np.add.at(np.moveaxis(total, self.axis, 0), self.picks, np.moveaxis(own, self.axis, 0))
        return total


@dataclass(frozen=True)
class InputEdit:
    """A change of one or several inputs, by name, and its words; None in a case that it does not apply to.

    Edits of one group are alternatives: once one explains a failure, later groups are not tried.
    """

    names: tuple[str, ...]
    words: str
    meaning: str
    change: Callable[[Argument, CaseSpec], Change | None]
    group: str = ""  # the dim along which it is
    exchanged: tuple[str, ...] = ()  # two inputs, in place of a change


def edits_of_inputs(scheme: Declared, case: CaseSpec) -> Iterator[InputEdit]:
    """All edits: numbers, two inputs exchanged, then orders along each dim, of one input and of all that have it."""
    args = [arg for arg in scheme.inputs if not arg.modified and scheme.draws[arg.name].kind in IN_ANY_ORDER]
    floats = [arg for arg in args if not arg.is_integer]
    axes = [axis for axis, size in case.mesh.items() if size > 1]
    for arg in floats:
        # A dim of size 1 is written as a number and has no name.
        yield from _numbers(arg, axes, [name for name in arg.spec.dim_names if name in case.dims])
    for one, other in combinations(floats, 2):
        if one.shape(case) == other.shape(case) and one.differentiable == other.differentiable:
            pair = one.name, other.name
            yield InputEdit((), f"{pair[0]} and {pair[1]} exchanged", "", _unchanged, EXCHANGED, pair)
    for name in dict.fromkeys(dim.name for arg in floats for dim in arg.spec.dims if dim.name):
        with_dim = [arg for arg in args if name in arg.spec.dim_names]
        targets = [(arg,) for arg in with_dim] + ([tuple(with_dim)] if len(with_dim) > 1 else [])
        for target in targets:
            yield from _orders(scheme, target, name, axes)


def _unchanged(arg: Argument, case: CaseSpec) -> Change:
    return Change()


def _numbers(arg: Argument, axes: Sequence[str], dims: Sequence[str]) -> Iterator[InputEdit]:
    for size in dict.fromkeys([*axes, *dims]):
        for power, text in POWERS:
            meaning = COUNTED.get(power, "").format(size) if size in axes else ""
            yield InputEdit((arg.name,), f"times {text.format(size)}", meaning, partial(_to_a_power, size, power))
    yield InputEdit((arg.name,), "with the opposite sign", "", lambda arg, case: Change(factor=-1.0))
    for addend, words in ((1.0, "plus 1"), (-1.0, "minus 1")):
        yield InputEdit((arg.name,), words, "", lambda arg, case, addend=addend: Change(addend=addend))


def _to_a_power(size: str, power: float, arg: Argument, case: CaseSpec) -> Change:
    return Change(factor=float({**case.dims, **case.mesh}[size]) ** power)


def _orders(scheme: Declared, target: Sequence[Argument], dim: str, axes: Sequence[str]) -> Iterator[InputEdit]:
    names = tuple(arg.name for arg in target)
    for places, words in ((1, "one place later"), (-1, "one place earlier")):
        yield InputEdit(names, f"{words} along {dim}", "", partial(_rolled, dim, places), dim)
    yield InputEdit(names, f"in the opposite order along {dim}", "", partial(_reversed, dim), dim)
    shared = {s.axis for arg in target for each in arg.spec.dims if each.name == dim for s in each.shardings}
    sharding = [axis for axis in axes if shared == {axis}]
    for axis in sharding:
        for which in (NEXT, PREVIOUS, FIRST):
            words = f"with {which} {axis} rank's shard of {dim} in place of each"
            yield InputEdit(names, words, "", partial(_of_shards, scheme, dim, axis, which), dim)
    blocks = [*BLOCKS, *axes]
    sizes = range(1, LARGEST_BLOCK + 1)
    forms = [form for p, c in product(blocks, sizes) for form in ((None, p, c), (p, None, c))]
    forms += [(p, q, None) for p, q in product(blocks, blocks)]
    for form, within in product(forms, (None, *sharding)):
        shown, swapped = _shape_text(form, dim), _shape_text((form[1], form[0], form[2]), dim)
        where = f" within each {within} rank's shard" if within else ""
        words = f"in another order along {dim}: {shown} is read as {swapped}{where}"
        yield InputEdit(names, words, "", partial(_transposed, scheme, dim, form, within), dim)


Form = tuple[int | str | None, int | str | None, int | None]  # sizes, names of axes, None for the rest of the dim


def _shape_text(form: Form, dim: str) -> str:
    parts = ["n" if each is None else str(each) for each in form]
    return f"({', '.join(parts[:2] if parts[2] == '1' else parts)})"


def _place(arg: Argument, dim: str) -> int:
    return list(arg.spec.dim_names).index(dim)


def _rolled(dim: str, places: int, arg: Argument, case: CaseSpec) -> Change:
    axis = _place(arg, dim)
    return Change(axis, np.roll(np.arange(arg.shape(case)[axis]), places))


def _reversed(dim: str, arg: Argument, case: CaseSpec) -> Change:
    axis = _place(arg, dim)
    return Change(axis, np.arange(arg.shape(case)[axis])[::-1])


def _shards(scheme: Declared, dim: str, axis: str, arg: Argument, case: CaseSpec) -> list[np.ndarray]:
    """The places along a dim of each rank of an axis that shards it."""
    place = _place(arg, dim)
    owner = owners(arg, case, scheme.layouts).get(axis)
    if owner is None or not owner.size:
        return []
    along = np.moveaxis(owner, place, 0).reshape(owner.shape[place], -1)[:, 0]
    return [np.flatnonzero(along == rank) for rank in range(case.mesh[axis])]


def _of_shards(scheme: Declared, dim: str, axis: str, which: str, arg: Argument, case: CaseSpec) -> Change | None:
    shards = _shards(scheme, dim, axis, arg, case)
    if len({len(shard) for shard in shards}) != 1:
        return None
    picks = np.empty(sum(map(len, shards)), np.int64)
    for rank, shard in enumerate(shards):
        other = {NEXT: (rank + 1) % len(shards), PREVIOUS: rank - 1, FIRST: 0}[which]
        picks[shard] = shards[other]
    return Change(_place(arg, dim), picks)


def _transposed(
    scheme: Declared, dim: str, form: Form, within: str | None, arg: Argument, case: CaseSpec
) -> Change | None:
    """The first two of three sizes exchanged, in the dim or in each shard of it."""
    axis = _place(arg, dim)
    size = arg.shape(case)[axis]
    groups = [np.arange(size)] if within is None else _shards(scheme, dim, within, arg, case)
    picks = np.arange(size)
    for group in groups:
        shape = [case.mesh[each] if isinstance(each, str) else each for each in form]
        known = int(np.prod([each for each in shape if each is not None]))
        if len(group) % known or not groups:
            return None
        shape = [len(group) // known if each is None else each for each in shape]
        picks[group] = group.reshape(shape).swapaxes(0, 1).ravel()
    return None if (picks == np.arange(size)).all() else Change(axis, picks)
