"""Pictures of specs: strips are compared with ones typed by hand, and the figure shows the same in colours."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from jax_ref.layouts import packed, ragged
from shardproof.declare.case import CaseSpec
from shardproof.declare.spec import parse
from shardproof.report.colours import of_rank
from shardproof.report.picture import figure, scheme_figure, scheme_picture, strips

MESH = {"cp": 4, "tp": 2}


def picture(text, sizes, mesh=MESH, layouts=None, custom=()):
    names = ("contiguous", "dual_chunk_swap", "packed", "ragged", "striped", *custom)
    return strips(parse(text, tuple(mesh), names, typeless_ok=True), sizes, mesh, layouts)


def test_a_line_for_each_sharding_and_each_type():
    assert picture("b s/cp:dual_chunk_swap v/tp", {"b": 2, "s": 16, "v": 6}) == (
        "s/cp:dual_chunk_swap  0011223333221100\n"
        "v/tp                  000111"
    )  # fmt: skip
    assert picture("b s cp=R tp=I", {"b": 2, "s": 3}) == (
        "cp=R  same value, gradients add up\n"
        "tp=I  same value, same gradient"
    )  # fmt: skip
    assert picture("cp=P", {}) == "cp=P  values add up, same gradient"
    assert picture("b s", {"b": 2, "s": 3}) == picture("", {}) == "whole on every rank"


def test_a_dim_sharded_twice_has_two_strips():
    assert picture("h/cp/tp", {"h": 8}) == "h/cp     00112233\nh/cp/tp  01010101"
    assert picture("h/tp/cp:striped", {"h": 8}) == "h/tp             00001111\nh/tp/cp:striped  01230123"


def test_lengths_come_with_the_layout():
    lengths = {"v/tp": partial(ragged, lengths=[5, 2]), "t/cp": partial(packed, cu_seqlens=[0, 4, 12])}
    assert picture("t/cp:packed v/tp:ragged", {"t": 12, "v": 7}, {"cp": 2, "tp": 2}, lengths) == (
        "t/cp:packed  011000111100\n"
        "v/tp:ragged  0000011"
    )  # fmt: skip
    assert picture("v/tp:ragged", {"v": 7}, {"tp": 2}) == "v/tp:ragged  0000111"


def test_size_one_and_nothing():
    assert picture("1/tp:ragged v/cp", {"v": 0}) == "1/tp:ragged  0\nv/cp         "


def test_custom_layouts_are_checked():
    def mine(size, world):
        return [np.arange(size)[::-1][r::world] for r in range(world)]

    assert picture("s/tp:mine", {"s": 5}, layouts={"mine": mine}, custom=("mine",)) == "s/tp:mine  01010"
    with pytest.raises(ValueError) as caught:
        picture("s/tp:mine", {"s": 5}, layouts={"mine": lambda size, world: [np.arange(3)] * 2}, custom=("mine",))
    assert str(caught.value) == (
        "layout 'mine' is not a partition of 5 positions over 2 ranks: missing [3, 4], repeated [0, 1, 2]"
    )


def test_a_rank_of_a_custom_layout_may_hold_nothing():
    """NumPy makes an empty list a float64 array, which is no array of positions."""

    def all_on_first_rank(size, world):
        return [list(range(size))] + [[]] * (world - 1)

    options = {"layouts": {"mine": all_on_first_rank}, "custom": ("mine",)}
    assert picture("s/tp:mine", {"s": 4}, **options) == "s/tp:mine  0000"
    assert picture("s/tp:mine/cp:mine", {"s": 4}, **options) == "s/tp:mine          0000\ns/tp:mine/cp:mine  0000"


def test_an_unshardable_dim_is_reported_by_name():
    with pytest.raises(ValueError) as caught:
        picture("s/cp:dual_chunk_swap", {"s": 30})
    assert str(caught.value) == "s=30 cannot be sharded by dual_chunk_swap over cp=4 (needs a multiple of 8); pad to 32"


def test_long_strips_are_counted():
    assert picture("s/cp:dual_chunk_swap", {"s": 4096}) == (
        "s/cp:dual_chunk_swap  0*512 1*512 2*512 3*1024 2*512 1*512 0*512"
    )
    assert picture("s/tp:striped", {"s": 100}).endswith("0*1 1*1 and 76 more runs")


def declared():
    mesh = ("cp", "tp")
    inputs = [("x", "b s/cp:ragged tp=I"), ("w", "tp=R cp=R")]
    args = [SimpleNamespace(name=name, spec=parse(text, mesh)) for name, text in inputs]
    output = SimpleNamespace(name="out", spec=parse("s/cp:ragged tp=I", mesh))
    return SimpleNamespace(inputs=args, outputs=[output], layouts={})


CASE = CaseSpec("x:f", {"cp": 2, "tp": 2}, {"b": 1, "s": 5}, layouts={"s/cp": {"name": "ragged", "lengths": [1, 4]}})


def test_the_picture_of_a_scheme():
    assert scheme_picture(declared(), CASE).splitlines() == [
        "mesh cp=2 tp=2",
        "x  b s/cp:ragged tp=I",
        "  s/cp:ragged  01111",
        "  tp=I         same value, same gradient",
        "w  tp=R cp=R",
        "  tp=R  same value, gradients add up",
        "  cp=R  same value, gradients add up",
        "-> out  s/cp:ragged tp=I",
        "  s/cp:ragged  01111",
        "  tp=I         same value, same gradient",
    ]


def bars(canvas):
    """(colour, width) of every bar, from left to right and top to bottom."""
    from matplotlib.colors import to_hex

    patches = [(p.get_y(), p.get_x(), to_hex(p.get_facecolor()), p.get_width()) for p in canvas.axes[0].patches]
    return [(paint, width) for _, _, paint, width in sorted(patches, key=lambda bar: (-bar[0], bar[1]))]


def test_each_run_has_a_bar_in_the_colour_of_its_rank():
    spec = parse("s/cp:dual_chunk_swap v/tp", ("cp", "tp"))
    painted = bars(figure({"x": spec}, {"s": 16, "v": 6}, MESH))
    expected = [0, 1, 2, 3, 2, 1, 0, 0, 1]
    assert [paint for paint, _ in painted] == [of_rank(rank).lower() for rank in expected]
    assert [round(width / painted[0][1]) for _, width in painted] == [
        1,
        1,
        1,
        2,
        1,
        1,
        1,
        4,
        4,
    ]  # rank 3's two chunks lie side by side


def test_the_figure_is_labelled():
    texts = [text.get_text() for text in scheme_figure(declared(), CASE).axes[0].texts]
    assert "x:  b s/cp:ragged tp=I" in texts and "s/cp:ragged" in texts
    assert texts.count("same value, gradients add up") == 2
    assert {"0", "1"} <= set(texts)
    assert "whole on every rank" in [t.get_text() for t in figure({"x": parse("b", ())}, {"b": 1}, {}).axes[0].texts]
    assert scheme_figure(declared(), CASE).axes[0].get_title(loc="left") == "mesh cp=2 tp=2"
