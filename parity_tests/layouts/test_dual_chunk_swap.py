"""DualChunkSwap: goldens, both statements alike, a partition, equal causal work, and the sizes it rejects."""

import pytest

from jax_ref.layouts import check_partition
from jax_ref.layouts import draw as draw_reference
from jax_ref.layouts import dual_chunk_swap as reference
from torch_impl.layouts import draw, dual_chunk_swap

MENU = [(2 * chunk * world, world) for world in (1, 2, 3, 4, 8, 37) for chunk in (0, 1, 2, 5)]


@pytest.mark.parametrize("layout", [reference, dual_chunk_swap])
def test_golden(layout):
    assert [piece.tolist() for piece in layout(8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [piece.tolist() for piece in layout(12, 3)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert [piece.tolist() for piece in layout(4, 1)] == [[0, 1, 2, 3]]
    assert [piece.tolist() for piece in layout(0, 2)] == [[], []]


def test_picture():
    assert draw(dual_chunk_swap, 8, 2) == draw_reference(reference, 8, 2) == "00111100"
    assert draw(dual_chunk_swap, 16, 4) == draw_reference(reference, 16, 4) == "0011223333221100"


@pytest.mark.parametrize(("size", "world"), MENU)
def test_production_is_the_reference_and_a_partition(size, world):
    expected = reference(size, world)
    check_partition("dual_chunk_swap", expected, size)
    assert [piece.tolist() for piece in dual_chunk_swap(size, world)] == [piece.tolist() for piece in expected]


@pytest.mark.parametrize(("size", "world"), MENU)
def test_every_rank_has_the_same_number_of_causal_pairs(size, world):
    pairs = {int((piece + 1).sum()) for piece in dual_chunk_swap(size, world)}
    assert pairs == {size * (size + 1) // 2 // world}


@pytest.mark.parametrize("layout", [reference, dual_chunk_swap])
@pytest.mark.parametrize(
    ("size", "world", "sentence"),
    [
        (30, 4, "size=30 cannot be sharded by dual_chunk_swap over world=4 (needs a multiple of 8); pad to 32"),
        (10, 2, "size=10 cannot be sharded by dual_chunk_swap over world=2 (needs a multiple of 4); pad to 12"),
        (3, 1, "size=3 cannot be sharded by dual_chunk_swap over world=1 (needs a multiple of 2); pad to 4"),
        (-8, 2, "size=-8 is not a size; sizes are 0 or more"),
        (8, 0, "world=0 is not a number of ranks; it is 1 or more"),
    ],
)
def test_rejections(layout, size, world, sentence):
    with pytest.raises(ValueError) as caught:
        layout(size, world)
    assert str(caught.value) == sentence
