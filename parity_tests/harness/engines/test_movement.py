"""Transfers of hand-written ledgers: which rank hands which block to which, and the order of steps."""

from shardproof.engines.ledger import Ledger, LedgerRow
from shardproof.engines.movement import Transfer, steps

WORLD = (0, 1, 2)


def row(rank, op, seq=0, group=WORLD, name="tp", size=12, out=12, source="f.py:3", **more):
    shapes = {"dtypes": ("float32",), "shapes": ((3,),), "source": source, **more}
    return LedgerRow(rank, seq, op, group, name, bytes_in=size, bytes_out=out, **shapes)


def on_all(op, group=WORLD, **more):
    return [row(rank, op, group=group, **more) for rank in group]


def moves(rows):
    """(source, target, bytes) of every transfer of a ledger of one step."""
    (step,) = steps(Ledger(rows))
    return {(move.source, move.target, move.size) for move in step.transfers}


def test_a_sum_takes_from_all_and_gives_to_all():
    assert moves(on_all("all_reduce", reduce_op="SUM")) == {(r, None, 12) for r in WORLD} | {
        (None, r, 12) for r in WORLD
    }
    assert moves(on_all("reduce", root=1)) == {(0, 1, 12), (1, 1, 12), (2, 1, 12)}


def test_a_gather_hands_each_block_to_each():
    assert moves(on_all("all_gather", out=36)) == {(a, b, 12) for a in WORLD for b in WORLD}
    assert moves(on_all("gather", root=2)) == {(0, 2, 12), (1, 2, 12), (2, 2, 12)}


def test_an_exchange_hands_each_rank_its_own_block():
    splits = [((1, 2, 0), (1, 0, 2)), ((0, 3, 0), (2, 3, 0)), ((2, 0, 1), (0, 0, 1))]
    rows = [row(rank, "all_to_all", splits=splits[rank]) for rank in WORLD]
    assert moves(rows) >= {(0, 0, 4), (0, 1, 8), (0, 2, 0), (1, 1, 12), (2, 0, 8), (2, 2, 4)}
    sent = [sum(size for source, _, size in moves(rows) if source == rank) for rank in WORLD]
    assert sent == [12, 12, 12]
    assert moves(on_all("reduce_scatter", out=4)) == {(a, b, 4) for a in WORLD for b in WORLD}


def test_a_broadcast_comes_from_its_root():
    assert moves(on_all("broadcast", root=1)) == {(1, 0, 12), (1, 2, 12)}
    scatter = [row(r, "scatter", root=0, size=12 if r == 0 else 0, out=4) for r in WORLD]
    assert moves(scatter) == {(0, 0, 4), (0, 1, 4), (0, 2, 4)}
    assert moves(on_all("barrier", size=0, out=0)) == set()


def test_groups_of_one_axis_stand_side_by_side():
    rows = [*on_all("all_reduce", group=(0, 1)), *on_all("all_reduce", group=(2, 3))]
    (step,) = steps(Ledger(rows))
    assert {move.group for move in step.transfers} == {(0, 1), (2, 3)} and step.missing == ()
    assert len(steps(Ledger([*rows[:2], row(2, "all_reduce", group=(2, 3), source="f.py:4"), rows[3]]))) == 2


def test_a_shift_is_one_step_and_a_chain_one_for_each_message():
    def message(source, target):
        return [row(source, "send", 0, peer=target), row(target, "recv", 0, size=0, peer=source)]

    ring = [half for rank in WORLD for half in message(rank, (rank + 1) % 3)]
    assert moves(ring) == {(0, 1, 12), (1, 2, 12), (2, 0, 12)}
    chain = steps(Ledger([*message(0, 1), *message(1, 2)]))
    assert [step.transfers for step in chain] == [(Transfer(0, 1, 12, WORLD),), (Transfer(1, 2, 12, WORLD),)]
    assert [len(step.rows) for step in chain] == [2, 2]


def test_a_receive_that_nobody_sends_for_has_no_transfer():
    (step,) = steps(Ledger([row(1, "recv", size=0, peer=0)]))
    assert step.transfers == () and step.rows[0].payload == 12


def test_who_did_not_issue_it_is_missing():
    (step,) = steps(Ledger(on_all("all_reduce")[:2]))
    assert step.missing == (2,)
    assert step.transfers == ()  # a collective that waits for a rank has handed nothing to any


def test_ranks_that_disagree_stand_in_one_step_without_transfers():
    (step,) = steps(Ledger([row(0, "all_reduce", group=(0, 1)), row(1, "all_gather", group=(0, 1))]))
    assert step.transfers == () and len(step.rows) == 2


def test_steps_stand_in_the_order_of_each_rank():
    """Rows from processes come rank by rank: the first steps of ranks 0 and 1 must not come after a step of all."""
    first = [row(r, "all_gather", group=(1, 2), name="cp") for r in (1, 2)]
    rows = [row(0, "all_reduce"), first[0], row(1, "all_reduce"), first[1], row(2, "all_reduce")]
    assert [step.rows[0].op for step in steps(Ledger(rows))] == ["all_gather", "all_reduce"]


def test_a_circle_of_ranks_that_wait_for_each_other_ends():
    a, b = ("a", (0, 1)), ("b", (0, 1))
    rows = [
        row(r, "all_reduce", name=name, group=group) for r, order in ((0, (a, b)), (1, (b, a))) for name, group in order
    ]
    assert [step.rows[0].group_name for step in steps(Ledger(rows))] == ["a", "b"]


def test_every_row_is_in_one_step():
    rows = [*on_all("all_reduce"), *on_all("all_to_all"), row(0, "send", peer=2), row(2, "recv", peer=0, size=0)]
    found = [id(each) for step in steps(Ledger(rows)) for each in step.rows]
    assert sorted(found) == sorted(map(id, rows)) and steps(Ledger()) == []
