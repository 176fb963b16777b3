"""Parity of pipelining.draw: each event is a box where the simulation put it."""

from hypothesis import given

from parity_tests.pipelining.drawn_orders import own_orders
from torch_impl.pipelining import Times, draw, simulate
from torch_impl.pipelining.draw import COLOURS


def boxes(ax):
    """(start, stop, colour) of what has a colour of a kind of action."""
    from matplotlib.colors import to_hex

    found = []
    for collection in ax.collections:
        colour = to_hex(collection.get_facecolor()[0])
        if colour in COLOURS.values():
            for path in collection.get_paths():
                (start, low), (stop, high) = path.vertices.min(0), path.vertices.max(0)
                found.append((start, stop, round((low + high) / 2), colour))
    return found


@given(own_orders())
def test_every_event_is_a_box_of_its_kind_in_the_row_of_its_rank(drawn):
    order, placed, _ = drawn
    timeline = simulate(order, placed, Times(2, 1, 3, 1))
    (ax,) = draw(timeline, "mine").axes
    assert boxes(ax) == [(e.start, e.stop, e.rank, COLOURS[e.action.kind]) for e in timeline.events]
    assert [text.get_text() for text in ax.texts] == [str(e.action.microbatch) for e in timeline.events]
    assert ax.get_title(loc="left") == "mine"
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"rank {rank}" for rank in range(len(order))]
