"""Contiguous and striped, which shard a stream regardless of sequences: goldens, reference, partition, messages."""

import pytest

from jax_ref import layouts as reference
from torch_impl import layouts

MENU = [(local * world, world) for world in (1, 2, 3, 4, 8, 37) for local in (0, 1, 2, 5)]
GOLDEN = {"contiguous": [[0, 1], [2, 3], [4, 5]], "striped": [[0, 3], [1, 4], [2, 5]]}
PICTURES = {"contiguous": "00001111", "striped": "01010101"}
both = pytest.mark.parametrize("kind", GOLDEN)
on_both_sides = pytest.mark.parametrize("side", [reference, layouts], ids=["reference", "production"])


def positions(pieces):
    return [piece.tolist() for piece in pieces]


@both
@on_both_sides
def test_golden(side, kind):
    layout = getattr(side, kind)
    assert positions(layout(6, 3)) == GOLDEN[kind]
    assert positions(layout(3, 1)) == [[0, 1, 2]]
    assert positions(layout(0, 2)) == [[], []]


@both
@on_both_sides
def test_picture(side, kind):
    assert side.draw(getattr(side, kind), 8, 2) == PICTURES[kind]


@both
@pytest.mark.parametrize(("size", "world"), MENU)
def test_production_is_the_reference_and_a_partition(size, world, kind):
    expected = getattr(reference, kind)(size, world)
    reference.check_partition(kind, expected, size)
    assert positions(getattr(layouts, kind)(size, world)) == positions(expected)


@both
@on_both_sides
@pytest.mark.parametrize(
    ("size", "world", "sentence"),
    [
        (30, 4, "size=30 cannot be sharded by {} over world=4 (needs a multiple of 4); pad to 32"),
        (1, 2, "size=1 cannot be sharded by {} over world=2 (needs a multiple of 2); pad to 2"),
        (-1, 2, "size=-1 is not a size; sizes are 0 or more"),
        (4, 0, "world=0 is not a number of ranks; it is 1 or more"),
    ],
)
def test_rejections(side, kind, size, world, sentence):
    with pytest.raises(ValueError) as caught:
        getattr(side, kind)(size, world)
    assert str(caught.value) == sentence.format(kind)
