"""The cause among several failed ranks, from hand-written outcomes."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from shardproof.engines.failure import CollectiveMismatch, Died
from shardproof.engines.ledger import LedgerRow
from shardproof.engines.processes.root_cause import DIED, RUNNING, Outcome, find_root_cause

ROW = LedgerRow(0, 0, "all_reduce", (0, 1), "tp", ("float32",), ((3,),), 12, 12, reduce_op="SUM", source="a.py:1")
WIDE = {"dtypes": ("int64",), "bytes_in": 24, "bytes_out": 24}
SEND = LedgerRow(0, 0, "send", (0, 1), "tp", ("float32",), ((4,),), 16, 0, peer=1, source="a.py:2")
RECV = LedgerRow(1, 0, "recv", (0, 1), "tp", ("float32",), ((2,),), 0, 8, peer=0, source="a.py:3")


def outcomes(rows, last, exit_code=-signal.SIGABRT):
    """Rank 0 waits in the last of its rows; of rank 1, which died, the last row is known."""
    waits = Outcome(0, RUNNING, tuple(rows), state=f"waits in {rows[-1]}", is_waiting=True)
    return [waits, Outcome(1, DIED, (last,), state=f"waits in {last}", is_waiting=True, exit_code=exit_code)]


@pytest.mark.parametrize("earlier", [0, 2])
def test_a_process_that_gloo_aborted_is_a_mismatch(earlier):
    rows = [replace(ROW, seq=seq) for seq in range(earlier + 1)]
    failure = find_root_cause(outcomes(rows, replace(ROW, rank=1, seq=earlier, source="a.py:9", **WIDE)), None)
    assert type(failure) is CollectiveMismatch
    assert str(failure) == (
        f"collective mismatch: dtype differs, at which gloo aborted rank 1: rank 1 issued all_reduce int64[3] SUM "
        f"(group tp, #{earlier}) at a.py:9\n  rank 0 issued all_reduce float32[3] SUM (group tp, #{earlier}) at a.py:1"
    )


def test_a_process_that_gloo_aborted_over_a_message_is_a_mismatch():
    failure = find_root_cause(outcomes([ROW, SEND], RECV), None)
    assert type(failure) is CollectiveMismatch
    assert str(failure).startswith(
        "collective mismatch: shape differs, at which gloo aborted rank 1: rank 1 issued recv"
    )


@pytest.mark.parametrize(
    ("rows", "last", "exit_code"),
    [
        ([ROW], replace(ROW, rank=1), -signal.SIGABRT),  # the rows fit
        ([ROW], replace(ROW, rank=1, seq=1, **WIDE), -signal.SIGABRT),  # rank 0 has not come so far
        ([ROW], replace(ROW, rank=1, **WIDE), -signal.SIGKILL),  # gloo does not send SIGKILL
        ([replace(SEND, tag=1)], RECV, -signal.SIGABRT),
        ([SEND], replace(SEND, rank=1, peer=0, shapes=((2,),)), -signal.SIGABRT),
    ],
)
def test_any_other_process_that_died_did_so_by_itself(rows, last, exit_code):
    failure = find_root_cause(outcomes(rows, last, exit_code), None)
    assert type(failure) is Died
    assert (failure.rank, failure.op, failure.source) == (1, last.op, last.source)


def test_a_process_that_died_after_a_collective_is_not_blamed_on_it():
    waits, dead = outcomes([replace(ROW, seq=1)], replace(ROW, rank=1), -signal.SIGKILL)
    failure = find_root_cause([waits, replace(dead, state="computes", is_waiting=False)], None)
    assert type(failure) is Died
    assert (failure.rank, failure.op, failure.source) == (1, None, None)
