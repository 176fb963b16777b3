"""The protocol check on hand-written ledgers: rows that fit, rows that do not, and rows that are still missing."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.engines.ledger import Ledger, LedgerRow
from shardproof.engines.protocol import crossed, disagreement


def row(rank: int, seq: int = 0, op: str = "all_reduce", **more: Any) -> LedgerRow:
    fields = {
        "group": (0, 1),
        "group_name": "tp",
        "dtypes": ("float32",),
        "shapes": ((3,),),
        "bytes_in": 12,
        "bytes_out": 12,
        "source": f"scheme.py:{10 * rank + seq}",
    }
    return LedgerRow(rank=rank, seq=seq, op=op, **(fields | more))


def both(*more: dict[str, Any]) -> Ledger:
    return Ledger([row(rank, **fields) for rank, fields in enumerate(more)])


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("op differs", {}, {"op": "broadcast", "root": 0}),
        ("reduce op differs", {"reduce_op": "SUM"}, {"reduce_op": "MAX"}),
        ("root differs", {"op": "broadcast", "root": 0}, {"op": "broadcast", "root": 1}),
        ("dtype differs", {}, {"dtypes": ("int32",)}),
        (
            "dtype differs",
            {"shapes": ((3,), (3,)), "dtypes": ("float32", "float32")},
            {"shapes": ((3,), (3,)), "dtypes": ("float32", "int32")},
        ),
        ("shape differs", {}, {"shapes": ((3, 1),)}),
        ("shape differs", {}, {"shapes": ((3,), (3,)), "dtypes": ("float32", "float32")}),
    ],
)
def test_property(what: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    mismatch = disagreement(both(first, second))
    assert mismatch is not None
    assert (mismatch.what, mismatch.row.rank, list(mismatch.others)) == (what, 1, [0])
    assert "scheme.py:10" in str(mismatch)
    assert "scheme.py:0" in mismatch.others[0]


def test_phase_source_async_and_bytes_may_differ() -> None:
    assert disagreement(both({"phase": "fwd"}, {"phase": "bwd", "is_async": True, "source": "other.py:1"})) is None


def test_the_odd_one_out_is_named() -> None:
    shapes = [(3,), (2,), (3,), (3,)]
    mismatch = disagreement(Ledger([row(r, shapes=(s,), group=(0, 1, 2, 3)) for r, s in enumerate(shapes)]))
    assert mismatch is not None
    assert (mismatch.row.rank, sorted(mismatch.others)) == (1, [0, 2, 3])


def test_the_first_in_the_order_of_issue_is_reported() -> None:
    rows = [
        row(0, group_name="cp", reduce_op="SUM"),
        row(0, reduce_op="SUM"),
        row(1, group_name="cp", reduce_op="MAX"),
        row(1, reduce_op="MAX"),
    ]
    mismatch = disagreement(Ledger(rows[1::2] + rows[::2]))
    assert mismatch is not None
    assert mismatch.row.group_name == "tp"
    mismatch = disagreement(Ledger(rows))
    assert mismatch is not None
    assert mismatch.row.group_name == "cp"


def test_rows_left_over_count_only_when_all_have_finished() -> None:
    ledger = Ledger([row(0), row(0, 1), row(1)])
    assert disagreement(ledger, complete=False) is None
    mismatch = disagreement(ledger)
    assert mismatch is not None
    assert mismatch.what == "not all ranks took part"
    assert mismatch.others[1].startswith("rank 1 issued nothing more in this group after all_reduce")


def test_a_rank_without_a_row_has_not_taken_part() -> None:
    mismatch = disagreement(Ledger([row(0)]))
    assert mismatch is not None
    assert mismatch.others == {1: "rank 1 issued nothing in this group"}


def test_splits_are_checked_in_pairs() -> None:
    fits = [((1, 2), (1, 3)), ((3, 4), (2, 4))]
    assert disagreement(both(*({"op": "all_to_all", "splits": s} for s in fits))) is None
    fits[1] = ((3, 4), (1, 4))
    mismatch = disagreement(both(*({"op": "all_to_all", "splits": s} for s in fits)))
    assert mismatch is not None
    assert mismatch.what == "splits differ: rank 0 sends 2 rows to rank 1, which expects 1"


def test_rows_of_an_all_to_all_are_of_one_shape() -> None:
    one = {"op": "all_to_all", "splits": ((1, 2), (1, 3)), "shapes": ((3, 2, 3),)}
    other = {"op": "all_to_all", "splits": ((3, 4), (2, 4)), "shapes": ((7, 2, 3),)}
    assert disagreement(both(one, other)) is None
    mismatch = disagreement(both(one, other | {"shapes": ((7, 6),)}))
    assert mismatch is not None
    assert mismatch.what == "shape differs"
    empty = {"op": "all_to_all", "splits": ((0, 0), (0, 3)), "shapes": ((0,),)}
    assert disagreement(both(empty, {"op": "all_to_all", "splits": ((3, 4), (0, 4)), "shapes": ((7, 6),)})) is None
    lists = {"op": "all_to_all", "dtypes": ("float32",) * 2, "shapes": ((1, 2), (3, 4))}
    assert disagreement(both(lists, lists | {"shapes": ((3, 4), (1, 2))})) is None


def test_a_scatter_has_inputs_on_its_root_only() -> None:
    root = {"op": "scatter", "root": 0, "dtypes": ("float32",) * 2, "shapes": ((3,), (3,))}
    other = {"op": "scatter", "root": 0, "dtypes": (), "shapes": (), "bytes_in": 0}
    assert disagreement(both(root, other)) is None
    mismatch = disagreement(both(root, other | {"bytes_out": 8}))
    assert mismatch is not None
    assert mismatch.what == "size differs: rank 1 expects 8 bytes of the scatter"


def test_messages_are_matched_by_pair_and_tag() -> None:
    def message(rank: int, op: str, seq: int = 0, tag: int = 0, size: int = 4) -> LedgerRow:
        return row(rank, seq, op, peer=1 - rank, tag=tag, shapes=((size,),))

    crossed_tags = [
        message(0, "send", 0, 1),
        message(0, "send", 1, 2),
        message(1, "recv", 0, 2),
        message(1, "recv", 1, 1),
    ]
    assert disagreement(Ledger(crossed_tags)) is None
    mismatch = disagreement(Ledger([message(0, "send"), message(1, "recv", size=2)]))
    assert mismatch is not None
    assert (mismatch.what, mismatch.row.op) == ("shape differs", "recv")
    for alone, silent in (
        (message(0, "send"), "rank 1 posted no recv for it"),
        (message(0, "recv"), "rank 1 sent nothing for it"),
    ):
        mismatch = disagreement(Ledger([alone]))
        assert mismatch is not None
        assert mismatch.others == {1: silent}
        assert disagreement(Ledger([alone]), complete=False) is None


def test_a_recv_from_anyone_takes_any_send() -> None:
    assert disagreement(Ledger([row(0, op="send", peer=1), row(1, op="recv", peer=None)])) is None


def test_waiting_in_two_groups_for_each_other_is_final() -> None:
    local_row, there = row(0), row(1, group_name="world")
    mismatch = crossed({0: local_row, 1: there}, Ledger([local_row, there]))
    assert mismatch is not None
    assert mismatch.what == "group differs"
    assert (
        crossed({0: local_row, 1: there}, Ledger([local_row, there, row(1)])) is None
    )  # rank 1 has done its part: 0 goes on
    disjoint = row(1, group=(1, 2), group_name="world")
    assert crossed({0: local_row, 1: disjoint}, Ledger([local_row, disjoint])) is None
    late = row(1, 0)
    assert crossed({0: local_row, 1: late}, Ledger([local_row, late])) is None
