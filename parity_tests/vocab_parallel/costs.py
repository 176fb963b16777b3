"""All_gathers of statistics over the vocabulary: one where tp has several ranks, none where one rank has full rows."""

from __future__ import annotations

from shardproof import CaseSpec


def over_tp(case: CaseSpec, numbers: int) -> tuple[int, int]:
    """(calls, bytes) of an all_gather of so many numbers in the dtype of sums."""
    several = case.mesh["tp"] > 1
    return int(several), several * numbers * case.accumulator_itemsize


def all_gathers(*parts: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """The sum of (calls, bytes), as a `Cost` takes it; nothing for no call."""
    calls, size = (sum(each) for each in zip(*parts, strict=True))
    return {"all_gather": (calls, size)} if calls else {}
