"""Triangles that are cut into smaller ones: the same pairs, and the same values, of runs of many lengths too."""

import numpy as np
import pytest
from hypothesis import given, settings

from jax_ref.context_parallel import seen_pairs
from parity_tests import check, every_case
from parity_tests.context_parallel.met_pairs import KINDS, streams, times_seen
from parity_tests.context_parallel.test_pairs import LENGTHS, packed_attention_of_many_lengths
from torch_impl.context_parallel import block


@pytest.fixture(autouse=True)
def small_triangles(monkeypatch):
    """So that short sequences are cut."""
    monkeypatch.setattr(block, "LEAST", 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_every_pair_meets_once(name, kind):
    layouts = streams(LENGTHS[name], kind, 2)
    whole = layouts[0]
    places = [x.numpy() for x in (whole.sequence_ids, whole.position_ids, ~whole.padding_mask)]
    expected = np.asarray(seen_pairs(*places, True, None))
    np.testing.assert_array_equal(sum(times_seen(layout, True, None) for layout in layouts), expected)


def test_parity():
    @settings(max_examples=20)
    @given(every_case(packed_attention_of_many_lengths))
    def example(case):
        check(case)

    example()
