"""The picture of a layout: one character for each position."""

import numpy as np
import pytest
import torch

from jax_ref.layouts import draw as reference
from jax_ref.layouts import dual_chunk_swap as swapped_reference
from jax_ref.layouts import striped as striped_reference
from torch_impl.layouts import draw, dual_chunk_swap, striped

SIZE = 76


@pytest.mark.parametrize(
    ("layout", "layout_reference", "ranks"),
    [(striped, striped_reference, 38), (dual_chunk_swap, swapped_reference, 19)],
)
def test_pictures_match_the_reference(layout, layout_reference, ranks):
    """38 ranks need letters, and more than there are; 19 have a chunk and its mirror image of two positions each."""
    assert draw(layout, SIZE, ranks) == reference(layout_reference, SIZE, ranks)


def test_letters_from_rank_ten_and_a_question_mark_from_rank_36():
    picture = "0123456789abcdefghijklmnopqrstuvwxyz??"
    assert draw(striped, 38, 38) == picture
    assert reference(striped_reference, 38, 38) == picture


def test_nothing_to_draw():
    assert draw(striped, 0, 3) == reference(striped_reference, 0, 3) == ""


def mine(size, world):
    return [[0, 1, 1, 3], [4, 5, 6, 7]]


def test_no_partition_no_picture():
    with pytest.raises(ValueError) as caught:
        reference(lambda size, world: list(map(np.array, mine(size, world))), 8, 2)
    assert (
        str(caught.value)
        == "layout '<lambda>' is not a partition of 8 positions over 2 ranks: missing [2], repeated [1]"
    )
    with pytest.raises(ValueError) as caught:
        draw(lambda size, world: list(map(torch.tensor, mine(size, world))), 8, 2)
    assert str(caught.value) == "layout '<lambda>' is not a partition of 8 positions over 2 ranks"
