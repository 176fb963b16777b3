"""The figure of layouts: strips in the colours of ranks, and the work under a causal mask beside them."""

import pytest
from matplotlib.colors import to_hex

from jax_ref.layouts import contiguous, dual_chunk_swap, packed
from shardproof.report.colours import of_rank, of_ranks
from shardproof.report.layout_picture import causal_work, figure


def test_the_work_is_counted_in_pairs():
    assert causal_work(contiguous(4, 2), [0, 4]).tolist() == [0.3, 0.7]  # 1 + 2 and 3 + 4 of 10
    assert causal_work(dual_chunk_swap(8, 2), [0, 8]).tolist() == [0.5, 0.5]
    assert causal_work(packed(12, 2, [0, 4, 12]), [0, 4, 12]).tolist() == [0.5, 0.5]
    assert causal_work([[0, 1], []], [0, 2]).tolist() == [1.0, 0.0]


def test_a_strip_and_bars_for_each_layout():
    canvas = figure({"blocks": contiguous(8, 2), "two": packed(8, 2, [0, 4, 8])}, {"two": [0, 4, 8]})
    first, work, second, _ = canvas.axes
    assert [to_hex(bar.get_facecolor()) for bar in first.patches] == [of_rank(rank).lower() for rank in (0, 1)]
    assert [text.get_text() for text in second.texts] == list("01010")
    assert [label.get_text() for label in second.get_yticklabels()] == ["two"]
    assert [line.get_xdata()[0] for line in second.lines] == [3.5]  # where the first sequence ends
    assert [to_hex(bar.get_facecolor()) for bar in work.patches] == [colour.lower() for colour in of_ranks(2)]
    assert (second.get_xlabel(), first.get_title(loc="left")) == ("position", "which rank holds which position")


def test_positions_that_are_no_partition_are_rejected():
    with pytest.raises(ValueError, match="not a partition"):
        figure({"mine": [[0, 1], [1]]})
