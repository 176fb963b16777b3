"""Calls that every rank rejects, in the same full words, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run


class Rejection(NamedTuple):
    """A call, and the error that each rank must raise: one message for all, or one for each rank."""

    name: str
    call: Callable[[Any], Any]  # with the rank's view of the mesh
    message: str | tuple[str, ...]
    kind: type[Exception] = ValueError


def rejected(mesh: Mapping[str, int], table: Iterable[tuple[Any, ...]]) -> Callable[[Rejection], None]:
    """A test of one item for each row of a table of rejections, named by the row.

        test_rejection = rejected({"cp": 2}, [("no group", lambda mesh: gather(X, None), "gather: group is None; ...")])

    A row is (name, call, message) or (name, call, message, kind); `kind` is ValueError if it is left out.
    """
    rows = [Rejection(*row) for row in table]

    @pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])
    def test(row: Rejection) -> None:
        check_rejection(mesh, *row)

    return test


def check_rejection(
    mesh: Mapping[str, int],
    name: str,
    call: Callable[[Any], Any],
    message: str | tuple[str, ...],
    kind: type[Exception] = ValueError,
) -> None:
    """AssertionError unless every rank raises exactly this error, and no rank begins a collective."""

    def body(view: Any, case: CaseSpec) -> str:
        try:
            returned = call(view)
        except kind as error:
            return f"{type(error).__name__}: {error}"
        return f"returned {returned!r}"

    ranks = run(body, CaseSpec(scheme=name, mesh=dict(mesh)))
    messages = message if isinstance(message, tuple) else (message,) * len(ranks.results)
    expected = [f"{kind.__name__}: {each}" for each in messages]
    assert list(ranks.results) == expected, f"{name}\nexpected {expected}\nactual   {list(ranks.results)}"
    assert ranks.ledger.rows == [], f"{name}\nexpected no collective\nactual   {ranks.ledger.rows}"
