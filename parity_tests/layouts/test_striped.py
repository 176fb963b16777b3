"""Striped: goldens, both statements alike, a partition, and the sizes it refuses."""

import pytest

from jax_ref.layouts import check_partition
from jax_ref.layouts import draw as draw_reference
from jax_ref.layouts import striped as reference
from torch_impl.layouts import draw, striped
from torch_impl.layouts.striped import positions

MENU = [(local * world, world) for world in (1, 2, 3, 4, 8, 37) for local in (0, 1, 2, 5)]


@pytest.mark.parametrize("layout", [reference, striped])
def test_golden(layout):
    assert [piece.tolist() for piece in layout(6, 3)] == [[0, 3], [1, 4], [2, 5]]
    assert [piece.tolist() for piece in layout(3, 1)] == [[0, 1, 2]]
    assert [piece.tolist() for piece in layout(0, 2)] == [[], []]


def test_picture():
    assert draw(striped, 8, 2) == draw_reference(reference, 8, 2) == "01010101"


@pytest.mark.parametrize(("size", "world"), MENU)
def test_production_is_the_reference_and_a_partition(size, world):
    expected = reference(size, world)
    check_partition("striped", expected, size)
    assert [piece.tolist() for piece in striped(size, world)] == [piece.tolist() for piece in expected]
    assert [positions(size, world, rank).tolist() for rank in range(world)] == [p.tolist() for p in expected]


@pytest.mark.parametrize("layout", [reference, striped])
@pytest.mark.parametrize(
    ("size", "world", "sentence"),
    [
        (30, 4, "size=30 cannot be cut by striped over world=4 (needs a multiple of 4); pad to 32"),
        (1, 2, "size=1 cannot be cut by striped over world=2 (needs a multiple of 2); pad to 2"),
        (-1, 2, "size=-1 is not a size; sizes are 0 or more"),
        (4, 0, "world=0 is not a number of ranks; it is 1 or more"),
    ],
)
def test_refusals(layout, size, world, sentence):
    with pytest.raises(ValueError) as caught:
        layout(size, world)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world(rank):
    with pytest.raises(ValueError) as caught:
        positions(4, 2, rank)
    assert str(caught.value) == f"striped: rank={rank} is not in a world of 2; ranks are 0 to 1"
