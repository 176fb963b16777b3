"""The picture of a layout: one character for each position."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from jaxtyping import Int
from torch import Tensor

from jax_ref.layouts import draw as reference
from jax_ref.layouts import dual_chunk_swap as swapped_reference
from jax_ref.layouts import striped as striped_reference
from shardproof import check, every_case, scheme, token_below
from torch_impl.layouts import draw, dual_chunk_swap, striped

SIZE = 76


def codes(picture):
    return [ord(character) for character in picture]


def pictures_by_hand(ids):
    """38 ranks need letters, and more than there are; 19 have a chunk and its mirror image of two positions each."""
    pictures = reference(striped_reference, SIZE, 38), reference(swapped_reference, SIZE, 19)
    return jnp.asarray([codes(picture) for picture in pictures], ids.dtype).T + 0 * ids


@scheme(
    reference=pictures_by_hand,
    mesh={"cp": (1, 2)},
    inputs={"ids": "s r/cp"},
    outputs="s r/cp",
    dims={"s": (SIZE,), "r": (2,)},
    draw={"ids": token_below("r")},
)
def pictures_of_layouts(mesh, ids) -> Int[Tensor, "s r/cp"]:
    """The characters, by their codes."""
    pictures = draw(striped, SIZE, 38), draw(dual_chunk_swap, SIZE, 19)
    return torch.tensor([codes(picture) for picture in pictures]).T.to(ids)[:, mesh.global_ids("r")]


@settings(max_examples=3)
@given(every_case(pictures_of_layouts))
def test_parity(case):
    check(case)


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
