"""Draws with ignored ids, and masks of these ids. Ranks import this for cotangents, so it loads no JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shardproof import CaseSpec, ids

# Padding, ids on either side of every vocabulary, and one that 32 bits would take for 1.
SOME_IGNORED = ids("v", ignore=(-100, -1, 2**31 - 1, 2**32 + 1))


def ignored(name: str) -> Callable[[CaseSpec, Mapping[str, np.ndarray]], np.ndarray]:
    """A function of a case and its inputs: the mask of the ignored ids of an input that is drawn as SOME_IGNORED."""
    return lambda case, inputs: (inputs[name] < 0) | (inputs[name] >= case.v)


IGNORED_TARGETS = ignored("target")


def next_is_ignored(case: CaseSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """[b, s-1]: True where the next id is ignored, so that the score of a position is 0."""
    return IGNORED_TARGETS(case, inputs)[:, 1:]


def is_dropped(case: CaseSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """[b, f], or [b, s] without a dim f: True from position u on. These positions have no result."""
    positions = case.dims.get("f", case.dims.get("s", 0))
    return np.broadcast_to(np.arange(positions) >= case.u, (case.b, positions))


def has_no_next(case: CaseSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """[b, s]: True where the next id is ignored or missing."""
    ignored = next_is_ignored(case, inputs)
    return np.pad(ignored, ((0, 0), (0, case.s - ignored.shape[1])), constant_values=True)


def next_in_row_is_ignored(lengths_of: str) -> Callable[[CaseSpec, Mapping[str, np.ndarray]], np.ndarray]:
    """[sequences, u]: True where the next id of a packed sequence is ignored or missing; `lengths_of` are its offsets.

    With the option `without_last` the last sequence is the padding of the stream, and all of its cells are True.
    """

    def rows(case: CaseSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        after, lengths = np.arange(1, case.u + 1), np.diff(inputs[lengths_of])[:, None]
        place = np.minimum(inputs["padded"][:-1, None] + after, case.t - 1)
        is_padding = (np.arange(len(lengths)) == len(lengths) - 1)[:, None] & case.options.get("without_last", False)
        return (after >= lengths) | IGNORED_TARGETS(case, inputs)[0, place] | is_padding

    return rows


def has_no_next_as_stored(case: CaseSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """`has_no_next` in the stored order: place j holds position argsort(keys)[j]."""
    order = np.argsort(inputs["keys"], kind="stable")
    return has_no_next(case, {**inputs, "target": inputs["target"][:, np.argsort(order)]})[:, order]


def is_dropped_as_stored(case: CaseSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """`is_dropped` in the stored order."""
    return is_dropped(case, inputs)[:, np.argsort(inputs["keys"], kind="stable")]


def is_last_in_stream(lengths_of: str) -> Callable[[CaseSpec, Mapping[str, np.ndarray]], np.ndarray]:
    """[1, t]: True for the last position of each sequence of a packed stream."""

    def rows(case: CaseSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        ends = inputs["padded"][:-1] + np.diff(inputs[lengths_of])
        place = np.arange(case.t)
        return (place + 1 >= ends[np.searchsorted(inputs["padded"][1:-1], place, side="right")])[None]

    return rows


def has_no_next_in_stream(lengths_of: str) -> Callable[[CaseSpec, Mapping[str, np.ndarray]], np.ndarray]:
    """[1, t]: True where the next id of a sequence of a packed stream is ignored or missing."""

    def rows(case: CaseSpec, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        ignored = np.append(IGNORED_TARGETS(case, inputs)[0, 1:], True)
        is_padding = (np.arange(case.t) >= inputs["padded"][-2]) & case.options.get("without_last", False)
        return is_last_in_stream(lengths_of)(case, inputs) | ignored | is_padding

    return rows
