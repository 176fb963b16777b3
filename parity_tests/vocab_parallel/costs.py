"""Costs of all_gathers of statistics over the vocabulary: one call if tp has several ranks, else none."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof import CaseSpec


def over_tp(case: CaseSpec, numbers: int) -> tuple[int, int]:
    """(calls, bytes) of an all_gather of this many `numbers`, in the dtype of sums."""
    several = case.mesh["tp"] > 1
    return int(several), several * numbers * case.accumulator_itemsize


def all_gathers(*over_tp: tuple[int, int], over_cp: Sequence[tuple[int, int]] = ()) -> dict[str, tuple[int, int]]:
    """The sums of (calls, bytes) over tp and over cp, as a `Cost` takes them; an axis without calls is left out."""
    sums = {axis: _sum(parts) for axis, parts in (("tp", over_tp), ("cp", over_cp))}
    return {f"all_gather/{axis}": (calls, size) for axis, (calls, size) in sums.items() if calls}


def _sum(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(calls for calls, _ in parts), sum(size for _, size in parts)
