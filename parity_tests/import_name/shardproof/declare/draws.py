"""How one input is drawn: a chooser makes a small JSON value, and that value with the case's seed makes an array.

A draw is relative to shards (shard k, its first or last column), so that a failing example shrinks to the rank and the
border that matter. Neither half needs Hypothesis: a chooser is any function that picks from a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator

from shardproof.declare.case import CaseSpec

EXTREME = ("huge", "large", "tiny", "peaked", "neg_inf_mask")  # values that many formulas never get in practice
FLOAT_KINDS = ("normal", "zeros", "ones", "iota", "ties", *EXTREME)
ALIKE = "alike"  # between 1/2 and 1; of a long case, see long_case.py
BY_NAME = ("positive", "uniform", "sorted", "probabilities", "nan")  # drawn only if named, for functions of such inputs
# Values for the border of a shard; with UNCHANGED in the same draw, a masked border is as likely as a border id.
EXTREMES = ("neg_inf_mask", "neg_inf_mask", "neg_inf_mask", "large", "zeros")
UNCHANGED = ("none", "none", "none")
# Which elements a mask keeps or at which an id is ignored: one shard's, all others, or a random prefix of each row.
# They differ from rank to rank, as a loss that divides by its rank's count is right for equal counts.
UNEVEN = ("prefix", "shard", "others")
KEEP = ("all", "half", *UNEVEN, "none", "first", "last", "prefix")
IGNORED = ("none", "half", *UNEVEN, "prefix")
PADDING = ("drawn", "nan")  # the content of rows of padding
NAN_SHARE = 0.2
PLACES = ("first", "middle", "last", "before", "after")
# Narrower than the dtype allows for float64: the reference is float64 too, and its intermediates must not overflow.
_RANGE = {"float64": 1e120, "float32": 3e38, "bfloat16": 3e38, "float16": 6e4}
_TINY = {"float64": 1e-290, "float32": 1e-30, "bfloat16": 1e-30, "float16": 1e-3}


def max_drawn(dtype: str) -> float:
    """The largest number drawn in a dtype."""
    return _RANGE[dtype]


class Chooser(Protocol):
    """Picks one of several options, the first being the simplest; for a Hypothesis strategy, an example."""

    def __call__(self, options: Any, /) -> Any: ...


@dataclass(frozen=True)
class Draw:
    """How an input is drawn: `kind` is float, ids, mask, offsets, lengths or integers; `dim` is its dim, if any.

    Rarer kinds have their own classes, see more_draws.
    """

    kind: str
    dim: str | None = None
    kinds: tuple[str, ...] = ()
    low: int = 0
    high: int = 0
    ignore: int | tuple[int, ...] | None = None
    padded: bool = False
    empty: bool = True  # whether a sequence may have no token
    full_rows: bool = False
    nan_rows: Callable[..., Any] | None = None  # the rows that may hold NaN

    @property
    def is_integer(self) -> bool:
        return self.kind != "float"

    def value(self, choose: Chooser, shards: int) -> dict[str, Any]:
        """The JSON record of one draw; `shards` is the number of shards of `dim`."""
        if self.kind == "float":
            padding = {} if self.nan_rows is None else {"padding": choose(PADDING)}
            return {"kind": choose(self.kinds), **self._border(choose), **padding}
        if self.kind == "ids":
            count = choose((1, 2, 3, 5))
            places = (*PLACES, "anywhere", "anywhere")  # four of seven are borders
            picks = [[choose(range(shards)), choose(places)] for _ in range(count)]
            ignored = {} if self.ignore is None else _pattern("ignored", IGNORED, choose)
            return {"kind": "ids", "dim": self.dim, "picks": picks, **ignored}
        if self.kind == "mask":
            return {"kind": "mask", **_pattern("keep", KEEP, choose)}
        return {"kind": self.kind}

    def _border(self, choose: Chooser) -> dict[str, list[Any]]:
        """An extreme value at the border of a shard or throughout the shard, whatever the other values are."""
        extremes = [kind for kind in EXTREMES if kind in self.kinds]
        extreme = choose((*UNCHANGED, *extremes)) if extremes else "none"
        if extreme == "none":
            return {}
        return {"border": [extreme, choose(range(8)), choose(("all", "first", "last"))]}

    def build(self, value: dict[str, Any], shape: tuple[int, ...], rng: Generator, case: CaseSpec) -> np.ndarray:
        """The full array: float64 (not yet rounded to the tested dtype), int64 or bool."""
        if self.kind == "float":
            return _floats(value["kind"], shape, rng, case.dtype, self.full_rows)
        if self.kind == "ids":
            return self._ids(value, shape, rng, case)
        if self.kind == "mask":
            return _mask(value["keep"], shape, rng)
        if self.kind == "integers":
            return rng.integers(self.low, self.high, size=shape, endpoint=True)
        lengths = np.array(case.lengths[self.dim or ""]["padded" if self.padded else "real"], dtype=np.int64)
        return lengths if self.kind == "lengths" else np.concatenate([[0], np.cumsum(lengths)])

    def _ids(self, value: dict[str, Any], shape: tuple[int, ...], rng: Generator, case: CaseSpec) -> np.ndarray:
        picks, size = value["picks"], case.dims[self.dim or ""]
        if size < 1 and math.prod(shape):
            raise ValueError(f"{self.dim}={size} leaves no id to draw; give {self.dim}=1 or more")
        borders = value.get("borders") or shard_borders(self.dim or "", case)  # of the case that they were drawn for
        out = rng.integers(0, max(size, 1), size=math.prod(shape))  # without elements, size may be 0
        for i in range(len(out)):
            shard, place = picks[i % len(picks)]
            if place != "anywhere":
                first, last = borders[shard % len(borders)]
                id_at = {"first": first, "middle": (first + last) // 2, "last": last, "before": first - 1}
                out[i] = min(max(id_at.get(place, last + 1), 0), size - 1)
        return out.reshape(shape)


def _pattern(key: str, patterns: Sequence[str], choose: Chooser) -> dict[str, Any]:
    """The record of one of several patterns, with the number of a shard for those that need one."""
    pattern = choose(patterns)
    return {key: pattern, "shard": choose(range(8))} if pattern in ("shard", "others") else {key: pattern}


def shard_borders(dim: str, case: CaseSpec) -> list[tuple[int, int]]:
    """First and last global id of each non-empty shard of a dim, taken as contiguous."""
    size = case.dims[dim]
    shardings = {key.split("/")[1]: record for key, record in case.layouts.items() if key.split("/")[0] == dim}
    ragged = [record["lengths"] for record in shardings.values() if "lengths" in record]
    shards = math.prod(case.mesh[axis] for axis in shardings)
    lengths = ragged[0] if ragged else [len(part) for part in np.array_split(np.arange(size), shards)]
    ends = np.cumsum(lengths)
    return [(int(e - n), int(e) - 1) for e, n in zip(ends, lengths, strict=True) if n] or [(0, size - 1)]


def with_border(
    array: np.ndarray, border: list[Any], dims: Sequence[str], case: CaseSpec, full_rows: bool
) -> np.ndarray:
    """The array with an extreme value in the first, the last or all columns of a shard of a sharded dim.

    `border` is [kind, number, place]; the number counts sharded dims, then shards. Without `full_rows`, each row keeps
    one unmasked value.
    """
    kind, number, place = border
    sharded = {key.partition("/")[0] for key in case.layouts}
    axes = [axis for axis, dim in enumerate(dims) if dim in sharded and dim in case.dims]
    if not axes or not array.size:
        return array
    axis = axes[int(number) % len(axes)]
    borders = shard_borders(dims[axis], case)
    first, last = borders[number // len(axes) % len(borders)]
    columns = {"first": [first], "last": [last]}.get(place, range(first, last + 1))
    inside = np.isin(np.arange(array.shape[axis]), columns)
    inside = np.broadcast_to(inside.reshape([-1 if i == axis else 1 for i in range(array.ndim)]), array.shape)
    largest = math.sqrt(_RANGE[case.dtype]) / 64.0
    extreme = {"neg_inf_mask": -np.inf, "zeros": 0.0}.get(kind, largest)
    changed = np.where(inside, extreme, array)
    if not full_rows:
        masked = np.isneginf(changed).all(axis=-1, keepdims=True)
        at = np.isfinite(array).argmax(axis=-1)[..., None]
        changed = np.where(masked & (np.arange(array.shape[-1]) == at), array, changed)
    return changed


def _floats(kind: str, shape: tuple[int, ...], rng: Generator, dtype: str, full_rows: bool) -> np.ndarray:
    normal = rng.standard_normal(shape)
    if kind == "zeros":
        return np.zeros(shape)
    if kind == "ones":
        return np.ones(shape)
    if kind == "iota":
        return (np.arange(normal.size, dtype=np.float64) % 101).reshape(shape)
    if kind == "ties":
        return np.rint(normal)
    if kind == "huge":
        return 1000.0 + 3.0 * normal
    if kind == "large":
        # Up to the square root of the range, divided by 64, so that a sum of 4,096 products is finite.
        return normal * 10.0 ** rng.uniform(0.0, math.log10(math.sqrt(_RANGE[dtype]) / 64.0), shape)
    if kind == "tiny":
        return normal * _TINY[dtype]
    if kind == ALIKE:
        return alike(rng, shape)
    if kind == "positive":
        return np.exp(normal)
    if kind == "uniform":
        return rng.random(shape)
    if kind == "sorted":
        return np.sort(normal, axis=-1) if normal.ndim else normal
    if kind == "probabilities":
        weights = np.exp(2.0 * normal)
        return weights / weights.sum(-1, keepdims=True) if normal.ndim else rng.random(shape)
    if kind == "peaked" and normal.ndim:
        # One nearly certain answer per row, as from a trained model: 1 - p is tiny and must still be accurate.
        peak = rng.integers(0, max(shape[-1], 1), size=shape[:-1])
        return np.where(np.arange(shape[-1]) == peak[..., None], normal + 24.0, normal)
    if kind == "nan":
        return np.where(rng.random(shape) < NAN_SHARE, np.nan, normal)
    if kind == "neg_inf_mask" and normal.ndim:
        masked = rng.random(shape) < 0.4
        if not full_rows:
            keep = rng.integers(0, max(shape[-1], 1), size=shape[:-1])
            masked &= np.arange(shape[-1]) != keep[..., None]
        return np.where(masked, -np.inf, normal)
    return normal


def alike(rng: Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers between 1/2 and 1."""
    return rng.uniform(0.5, 1.0, shape)


def _mask(keep: str, shape: tuple[int, ...], rng: Generator) -> np.ndarray:
    position = np.arange(shape[-1]) if shape else np.zeros((), np.int64)
    rows = {
        "all": position >= 0,
        "none": position < 0,
        "first": position == 0,
        "last": position == (shape[-1] - 1 if shape else 0),
    }
    if keep in UNEVEN:  # of which `uneven_rows` keeps some
        keep = "all"
    return rng.random(shape) < 0.5 if keep == "half" else np.broadcast_to(rows[keep], shape).copy()


def has_infinities(value: dict[str, Any]) -> bool:
    """Whether a drawn value contains -inf or NaN."""
    return value.get("kind") == "nan" or "neg_inf_mask" in (value.get("kind"), value.get("border", [None])[0])


def values(
    *kinds: str,
    full_rows: bool = False,
    nan_rows: Callable[[CaseSpec, Mapping[str, np.ndarray]], Any] | None = None,
) -> Draw:
    """Floating values of the given kinds, some at the borders of shards; by default, all general kinds.

    `positive`, `uniform` (in [0, 1)), `sorted`, `probabilities` (along the last dim) and `nan` (a fifth of the numbers)
    are drawn only if named.
    `full_rows` lets a mask cover a full row. `nan_rows(case, inputs)` returns bools over leading dims, True for rows of
    padding, which a function must not read: their values are NaN in half of the cases. `inputs` has the other full
    inputs by name.
    """
    unknown = [kind for kind in kinds if kind not in (*FLOAT_KINDS, *BY_NAME)]
    if unknown:
        raise ValueError(f"values: kind {unknown[0]!r} is not one of {', '.join((*FLOAT_KINDS, *BY_NAME))}")
    return Draw("float", kinds=kinds or FLOAT_KINDS, full_rows=full_rows, nan_rows=nan_rows)


def token_below(dim: str) -> Draw:
    """Token ids in [0, size of `dim`), biased to the borders of its shards; `ids` also draws ignored ones."""
    return Draw("ids", dim)


def ids(dim: str, ignore: int | tuple[int, ...] | None = None) -> Draw:
    """Token ids like `token_below`, some replaced by `ignore` (such as -100), or each of these by one of several."""
    return Draw("ids", dim, ignore=ignore)


def mask(dim: str | None = None) -> Draw:
    """A boolean mask over the input's own last dim; `dim` only documents its name."""
    return Draw("mask", dim)


def offsets(dim: str, padded: bool = False, *, empty: bool = True) -> Draw:
    """cu_seqlens of the drawn sequences of packed dim `dim`: their real or their padded borders.

    With `empty=False` each sequence has a token or more.
    """
    return Draw("offsets", dim, padded=padded, empty=empty)


def lengths(dim: str, padded: bool = False, *, empty: bool = True) -> Draw:
    """Lengths of the drawn sequences of packed dim `dim`; with `empty=False` each has a token or more."""
    return Draw("lengths", dim, padded=padded, empty=empty)


def integers(low: int, high: int) -> Draw:
    """Integers in [low, high]."""
    if low > high:
        raise ValueError(f"integers: low={low} is above high={high}")
    return Draw("integers", low=low, high=high)
