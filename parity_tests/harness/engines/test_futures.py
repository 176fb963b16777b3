"""Work whose future is taken counts as waited for once the future is, and not before."""

from collections.abc import Callable

import pytest

from parity_tests.specimens import futures_of_work
from shardproof.declare.case import CaseSpec
from shardproof.engines.lockstep import lockstep
from shardproof.engines.processes import pool

CASE = CaseSpec("futures", {"tp": 2})


@pytest.mark.parametrize("run", [lockstep.run, pool.run])
@pytest.mark.parametrize(
    ("body", "is_marked"),
    [(body, True) for body in futures_of_work.NEVER_WAIT] + [(body, False) for body in futures_of_work.WAIT],
)
def test_taking_a_future_is_no_wait(run: Callable, body: Callable, is_marked: bool) -> None:
    rows = run(body, CASE).ledger.rows
    assert (
        sorted((row.rank, row.op) for row in rows if row.unwaited) == [(0, "all_reduce"), (1, "all_reduce")] * is_marked
    )


@pytest.mark.parametrize("run", [lockstep.run, pool.run])
def test_a_callbacks_collective_is_the_ranks(run: Callable) -> None:
    ledger = run(futures_of_work.sums_in_a_callback, CASE).ledger
    assert [len(ledger.of(rank)) for rank in range(2)] == [2, 2]
