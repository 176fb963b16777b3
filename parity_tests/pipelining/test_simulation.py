"""Parity of pipelining.simulation: closed forms, bounds, laws of time, and rejections."""

import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ref.pipelining import reference
from parity_tests.pipelining.drawn_orders import legal_sizes, named_orders, own_orders
from torch_impl.pipelining import Times, draw, schedule_order, simulate, stage_to_rank
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.order import Action, computations, parse_action
from torch_impl.pipelining.simulation import COLOURS, WIDEST

TIME = st.integers(1, 9)
DURATIONS = st.builds(Times, TIME, TIME, TIME, st.integers(0, 5))


def simulated(name, p, n, v, times=None):
    return simulate(schedule_order(name, p, n, v), stage_to_rank(p, p * v, RULES[name].style), times)


def in_closed_form(name, max_microbatches=16):
    """(p, n, v) where the closed form is promised."""
    for p, n, v in legal_sizes(name, ranks=range(1, 6), max_microbatches=max_microbatches, chunks=(1, 2, 4)):
        whole_rounds = name not in ("Interleaved1F1B", "InterleavedZeroBubble") or n % p == 0
        enough = name != "ZBVZeroBubble" or n >= 2 * p
        if whole_rounds and enough and (v == 2 or name != "InterleavedZeroBubble"):
            yield p, n, v


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("name", list(RULES))
def test_idle_time_and_bubble_are_the_closed_form(name):
    for p, n, v in in_closed_form(name):
        timeline = simulated(name, p, n, v)
        assert set(timeline.idle) == {reference.idle(name, p, n, v)}, (p, n, v)
        bubble = reference.bubble(name, p, n, v)
        assert set(timeline.bubble) == {bubble.numerator / bubble.denominator}, (p, n, v)


@pytest.mark.parametrize("name", reference.FILL_AND_DRAIN)
def test_live_chunks_are_the_closed_form(name):
    for p, n, v in in_closed_form(name):
        live = [reference.live_chunks(name, p, n, v, rank) for rank in range(p)]
        assert list(simulated(name, p, n, v).peak_live) == live, (p, n, v)


@pytest.mark.parametrize("name", reference.FILL_ALONE)
def test_live_chunks_are_bounded(name):
    peaks = [
        max(simulated(name, p, n, v).peak_live) - reference.live_bound(name, p)
        for p, n, v in legal_sizes(name, max_microbatches=16, chunks=(2,))
        if name != "InterleavedZeroBubble" or n % p == 0
    ]
    assert max(peaks) == 0


@pytest.mark.parametrize("name", reference.FILL_AND_DRAIN)
@given(data=st.data())
def test_idle_time_for_any_durations(name, data):
    p, n, v = data.draw(st.sampled_from(list(in_closed_form(name, max_microbatches=8))))
    f, i, w = (data.draw(TIME) for _ in range(3))
    assert set(simulated(name, p, n, v, Times(f, i, w)).idle) == {reference.idle(name, p, n, v, f, i, w)}


def test_figures_by_hand():
    assert simulated("LoopedBFS", 3, 1, 4).idle == (24, 24, 24)
    assert simulated("LoopedBFS", 3, 3, 4).idle == (6, 6, 6)
    assert simulated("Interleaved1F1B", 4, 8, 2).peak_live == (11, 9, 7, 5)
    assert simulated("ZBVZeroBubble", 4, 4, 2).bubble == (0.2,) * 4
    gpipe = simulated("GPipe", 2, 2, 1, Times(f=2, i=1, w=3, p2p=5))
    assert [(e.rank, str(e.action), e.start, e.stop) for e in gpipe.events] == [
        (0, "0F0", 0, 2),
        (0, "0F1", 2, 4),
        (0, "0B0", 20, 24),
        (0, "0B1", 24, 28),
        (1, "1F0", 7, 9),
        (1, "1F1", 9, 11),
        (1, "1B0", 11, 15),
        (1, "1B1", 15, 19),
    ]
    assert gpipe.live(0) == [(0, 1), (2, 2), (24, 1), (28, 0)]


def test_each_stage_has_its_own_times():
    timeline = simulated("GPipe", 2, 1, 1, Times(f=(1, 10), i=[2, 20], w=(4, 40)))
    assert [(str(e.action), e.start, e.stop) for e in timeline.events] == [
        ("0F0", 0, 1),
        ("0B0", 71, 77),
        ("1F0", 1, 11),
        ("1B0", 11, 71),
    ]


def test_a_message_within_a_rank_takes_no_time():
    assert simulated("ZBVZeroBubble", 1, 3, 2, Times(p2p=100)).makespan == 18


def test_a_split_backward_sends_before_its_weights_are_done():
    order = [[parse_action(text) for text in row.split()] for row in ("0F0 0I0 0W0", "1F0 1I0 1W0")]
    assert simulate(order, [0, 1]).makespan == 5


@given(named_orders(ranks=range(1, 5), max_microbatches=8), DURATIONS)
def test_no_schedule_beats_its_work_and_its_longest_path(sample, times):
    _, p, n, v, order, placed = sample
    timeline = simulate(order, placed, times)
    work = n * v * (times.f + times.i + times.w)
    hops = sum(a != b for a, b in pairwise(placed))
    path = p * v * (times.f + times.i) + times.w + 2 * hops * times.p2p
    assert set(timeline.busy) == {work}
    assert timeline.makespan >= max(work, path)
    for rank in range(p):
        events = timeline.of(rank)
        assert [event.action for event in events] == computations(order[rank])
        assert all(a.stop <= b.start for a, b in pairwise(events))
        assert timeline.live(rank)[-1][1] == 0


@given(own_orders(), DURATIONS, st.sampled_from("fiw") | st.just("p2p"), TIME)
def test_longer_times_never_end_earlier(sample, times, name, more):
    order, placed, _ = sample
    longer = Times(**{**vars(times), name: getattr(times, name) + more})
    before, after = simulate(order, placed, times), simulate(order, placed, longer)
    assert after.makespan >= before.makespan
    pairs = zip(before.events, after.events, strict=True)
    assert all(late.start >= early.start and late.stop >= early.stop for early, late in pairs)


@given(own_orders(), DURATIONS, st.fractions(Fraction(1, 8), 8))
def test_scaled_times_scale_everything(sample, times, scale):
    order, placed, _ = sample
    scaled = Times(*(time * scale for time in vars(times).values()))
    before, after = simulate(order, placed, times), simulate(order, placed, scaled)
    assert after.makespan == before.makespan * scale
    assert after.idle == tuple(idle * scale for idle in before.idle)


@given(own_orders(), DURATIONS)
def test_everything_starts_when_the_last_thing_it_waits_for_is_there(sample, times):
    order, placed, _ = sample
    timeline = simulate(order, placed, times)
    stop = {event.action: event.stop for event in timeline.events}
    for rank in range(len(order)):
        free = 0
        for event in timeline.of(rank):
            s, kind, m = event.action[:3]
            source = s - 1 if kind == "F" else s + 1
            kinds = "F" if kind == "F" else "BI" if kind in "BI" else ""
            sent = [stop[Action(source, k, m)] for k in kinds if Action(source, k, m) in stop]
            arrived = [time + (times.p2p if placed[source] != rank else 0) for time in sent]
            assert event.start == max([free, *arrived])
            free = event.stop


REJECTED = [
    (["0F0 0B0 0F0"], [0], "order: rank 0, position 2: '0F0' occurs a second time"),
    (["0B0 0F0"], [0], "order: rank 0, position 0: '0B0' comes before '0F0'"),
    (["0F0 0W0 0I0"], [0], "order: rank 0, position 1: '0W0' comes before '0I0'"),
    (["0F0 0B0 0I0"], [0], "order: rank 0, position 2: '0I0' occurs beside '0B0'"),
    (["0F0"], [0], "order: rank 0, position 1: the rank ends without '0B0'"),
    (["0F0 0I0"], [0], "order: rank 0, position 2: the rank ends without '0W0'"),
    (["0F0 0B0 0F2 0B2"], [0], "order: rank 0, position 4: the rank ends without '0F1'"),
    (["0F0 0B0 1F0"], [0], "order: rank 0, position 2: '1F0' is of stage 1; there are 1"),
    (["0F0 0B0 1F0 1B0", ""], [0, 1], "position 2: '1F0' is on rank 0, but stage 1 is on rank 1"),
    (["0F0 0B0"], [0, 1], "order: rank 1, position 0: stage 1 is on rank 1; the order has 1"),
    (
        ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
        [0, 1],
        "order: rank 0, position 1: deadlock: rank 0 waits in '0B0' for '1B0' of rank 1, "
        "rank 1 waits in '1F1' for '0F1' of rank 0",
    ),
]


@pytest.mark.parametrize(("rows", "placed", "words"), REJECTED)
def test_orders_that_cannot_be_are_rejected(rows, placed, words):
    with pytest.raises(ValueError, match=r"^order: ") as rejection:
        simulate([[parse_action(text) for text in row.split()] for row in rows], placed)
    assert words in str(rejection.value)


def test_microbatches_out_of_range_are_rejected():
    order = [[parse_action(text) for text in ("0F0", "0B0", "0F1", "0B1")]]
    with pytest.raises(ValueError, match="rank 0, position 2: '0F1' is of micro-batch 1; there are 1"):
        simulate(order, [0], n_microbatches=1)
    with pytest.raises(ValueError, match="rank 0, position 4: the rank ends without '0F2'"):
        simulate(order, [0], n_microbatches=3)


@pytest.mark.parametrize(("name", "time"), [("f", -1), ("i", float("nan")), ("w", [1, float("inf")]), ("p2p", True)])
def test_times_that_cannot_be_are_rejected(name, time):
    with pytest.raises(ValueError, match=rf"^pipelining\.Times: {name}="):
        Times(**{name: time})


@pytest.mark.parametrize(("name", "time"), [("f", "long"), ("i", None), ("p2p", [1, 2])])
def test_times_of_other_kinds_are_rejected(name, time):
    with pytest.raises(TypeError, match=rf"^pipelining\.Times: {name}="):
        Times(**{name: time})


def test_where_nothing_takes_time_no_rank_waits():
    timeline = simulated("GPipe", 2, 2, 1, Times(0, 0, 0))
    assert (timeline.makespan, timeline.bubble) == (0, (0, 0))
    assert str(timeline).splitlines()[1] == "rank 0 || idle 0.0%, live 0"  # an ending action makes room first


def test_each_stage_needs_a_time():
    with pytest.raises(ValueError, match=r"pipelining\.Times: w has 1 times, but there is a stage 1"):
        simulated("GPipe", 2, 1, 1, Times(w=[1]))


def test_a_simulation_loads_no_torch():
    program = "import sys, torch_impl.pipelining; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


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


def test_times_without_a_common_unit_are_scaled_to_the_width():
    (_, row) = grid("GPipe", 1, 1, 1, "loop", Times(f=0.1, i=0.1, w=0.1)).splitlines()
    assert len(row.partition("|")[2].partition("|")[0].split()) == WIDEST


def test_live_chunks_over_time():
    timeline = simulate(schedule_order("ZBVZeroBubble", 1, 1, 2), [0, 0])
    assert timeline.live(0) == [(0, 1), (1, 2), (4, 1), (6, 0)]
    assert timeline.peak_live == (2,)


def boxes(ax):
    """(start, stop, colour) of every box with the colour of an action's kind."""
    from matplotlib.colors import to_hex

    rectangles = []
    for collection in ax.collections:
        colour = to_hex(collection.get_facecolor()[0])
        if colour in COLOURS.values():
            for path in collection.get_paths():
                (start, low), (stop, high) = path.vertices.min(0), path.vertices.max(0)
                rectangles.append((start, stop, round((low + high) / 2), colour))
    return rectangles


@pytest.mark.slow
@given(own_orders())
def test_every_event_is_a_box_of_its_kind_in_the_row_of_its_rank(sample):
    order, placed, _ = sample
    timeline = simulate(order, placed, Times(2, 1, 3, 1))
    (ax,) = draw(timeline, "mine").axes
    assert boxes(ax) == [(e.start, e.stop, e.rank, COLOURS[e.action.kind]) for e in timeline.events]
    assert [text.get_text() for text in ax.texts] == [str(e.action.microbatch) for e in timeline.events]
    assert ax.get_title(loc="left") == "mine"
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"rank {rank}" for rank in range(len(order))]


def test_a_grid_that_is_too_wide_continues_below():
    timeline = simulate(schedule_order("ZBVZeroBubble", 4, 8, 2), stage_to_rank(4, 8, "v"))
    whole, lines = str(timeline).splitlines(), timeline.text(80).splitlines()
    assert timeline.text(1000) == str(timeline) and max(map(len, lines)) <= 80
    bands = "\n".join(lines[1:]).split("\n\n")
    for rank, row in enumerate(whole[1:]):
        pieces = [band.splitlines()[rank].partition("|")[2] for band in bands]
        assert " ".join(pieces).split() == row.partition("|")[2].split()
