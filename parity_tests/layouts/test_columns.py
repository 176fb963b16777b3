"""Parity of layouts.columns."""

import itertools

import pytest
import torch

from jax_ref.layouts import reference
from torch_impl.layouts.columns import MambaSizes, conv_channels, projection_columns

CUT = [
    (*sizes, cp)
    for *sizes, cp in itertools.product((4, 8, 12), (1, 3), (1, 2, 4), (1, 2), (1, 2, 4))
    if MambaSizes(*sizes).indivisible(cp) is None
]


@pytest.mark.parametrize(("heads", "width", "groups", "state", "cp"), CUT)
def test_columns_match_the_reference(heads, width, groups, state, cp):
    sizes = MambaSizes(heads, width, groups, state)
    for ours, theirs in ((projection_columns, reference.projection_columns), (conv_channels, reference.conv_channels)):
        expected = [columns.tolist() for columns in theirs(heads, width, groups, state, cp)]
        assert ours(sizes, cp).tolist() == expected
    assert projection_columns(sizes, cp).shape[1] == sizes.local(cp).width
    assert conv_channels(sizes, cp).shape[1] == sizes.local(cp).channels


def test_columns_typed_by_hand():
    columns = projection_columns(MambaSizes(4, 1, 2, 1), 4)
    assert columns[[1, 3]].tolist() == [[1, 5, 8, 10, 13], [3, 7, 9, 11, 15]]
    assert conv_channels(MambaSizes(4, 1, 2, 1), 4)[[1, 3]].tolist() == [[1, 4, 6], [3, 5, 7]]
    assert projection_columns(MambaSizes(2, 2, 2, 2), 2).tolist() == [
        [0, 1, 4, 5, 8, 9, 12, 13, 16],
        [2, 3, 6, 7, 10, 11, 14, 15, 17],
    ]


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_every_column_is_on_one_rank_and_shared_groups_on_each_rank_that_shares_them(cp):
    sizes = MambaSizes(8, 2, 2, 3)
    count = torch.bincount(projection_columns(sizes, cp).flatten(), minlength=sizes.width)
    shared = torch.zeros(sizes.width, dtype=torch.bool)
    shared[2 * sizes.inner : sizes.width - sizes.num_heads] = True
    assert (count[~shared] == 1).all()
    assert (count[shared] == max(cp // 2, 1)).all()


REJECTED = [
    (6, 2, 4, "num_heads=6 must be divisible by cp_size=4; use cp=2 or 3, or MambaStatePassing"),
    (5, 5, 2, "num_heads=5 must be divisible by cp_size=2; use MambaStatePassing"),
    (12, 3, 4, "cp_size=4 must be divisible by n_groups=3 when n_groups < cp_size"),
    (12, 6, 4, "n_groups=6 must be divisible by cp_size=4"),
]


@pytest.mark.parametrize(("heads", "groups", "cp", "text"), REJECTED)
def test_rejection(heads, groups, cp, text):
    for columns in (projection_columns, conv_channels):
        with pytest.raises(ValueError) as caught:
            columns(MambaSizes(heads, 1, groups, 1), cp)
        assert str(caught.value) == text
