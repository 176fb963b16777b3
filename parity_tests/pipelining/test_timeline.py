"""Parity of pipelining.timeline: the grid by hand, and for times without a common measure."""

from torch_impl.pipelining import Times, schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.timeline import WIDEST


def grid(name, p, n, v, style, times=None):
    return str(simulate(schedule_order(name, p, n, v), stage_to_rank(p, p * v, style), times))


def test_a_grid_by_hand():
    assert grid("1F1B", 2, 2, 1, "loop") == "\n".join(
        [
            "2 ranks, 2 stages, makespan 9",
            "rank 0 |F0 F1 .  .  B0 -  .  B1 - | idle 33.3%, live 2",
            "rank 1 |.  F0 B0 -  F1 B1 -  .  . | idle 33.3%, live 1",
        ]
    )


def test_second_chunks_have_small_letters():
    assert "|F0 f0 i0 w0 F1 I0 W0 f1 i1 w1 I1 W1|" in grid("ZBVZeroBubble", 1, 2, 2, "v")


def test_columns_are_the_measure_of_all_times():
    rows = grid("GPipe", 1, 1, 1, "loop", Times(f=0.5, i=1, w=0.25)).splitlines()
    assert rows[1] == "rank 0 |F0 -  B0 -  -  -  - | idle 0.0%, live 1"
    rows = grid("GPipe", 1, 1, 1, "loop", Times(f=2, i=2, w=2)).splitlines()
    assert rows[1] == "rank 0 |F0 B0 - | idle 0.0%, live 1"


def test_times_without_a_measure_are_shares_of_the_whole():
    (_, row) = grid("GPipe", 1, 1, 1, "loop", Times(f=0.1, i=0.1, w=0.1)).splitlines()
    assert len(row.partition("|")[2].partition("|")[0].split()) == WIDEST


def test_live_chunks_over_time():
    timeline = simulate(schedule_order("ZBVZeroBubble", 1, 1, 2), [0, 0])
    assert timeline.live(0) == [(0, 1), (1, 2), (4, 1), (6, 0)]
    assert timeline.peak_live == (2,)
