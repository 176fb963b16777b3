"""Lists of columns between bounds that close in."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_impl.vocab_parallel import filter_bounds as c


def within(candidates, low, high, rows):
    """Flat places of what is listed and within the bounds, each list checked to be in order and true."""
    places = []
    for part, picked in candidates.between(low, high):
        flat = (picked.rows + part.start) * rows.shape[1] + picked.columns
        assert (flat.diff() > 0).all() and (picked.rows < part.stop - part.start).all()
        assert torch.equal(rows.flatten()[flat], picked.logits)
        inside = (picked.logits >= low[part][picked.rows]) & (picked.logits <= high[part][picked.rows])
        places.append(flat[inside])
    return torch.cat(places).sort().values


@given(seed=st.integers(0, 2**16), wide=st.booleans(), chunk_size=st.sampled_from([None, 1, 40]))
def test_every_column_within_the_bounds_is_listed_in_every_round(seed, wide, chunk_size):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, 1200 if wide else 7, generator=generator)[:, 1:]  # no flat view has these strides
    rows = logits.reshape(9, -1)
    candidates = c.Candidates(logits, chunk_size)
    low, high = torch.full((9,), -torch.inf), torch.full((9,), torch.inf)
    for width in (torch.inf, 1.0, 0.25, 0.0):
        low, high = torch.maximum(low, rows[:, 2] - width), torch.minimum(high, rows[:, 2] + width)
        inside = (rows >= low[:, None]) & (rows <= high[:, None])
        assert torch.equal(within(candidates, low, high, rows), inside.flatten().nonzero().squeeze(-1).int())


def test_a_short_list_is_cached_and_a_long_one_is_not():
    logits = torch.zeros(2, 200)
    candidates = c.Candidates(logits, 1)
    everything = torch.full((2,), -torch.inf), torch.full((2,), torch.inf)
    assert [len(picked.rows) for _, picked in candidates.between(*everything)] == [200, 200]
    logits[0] = 1.0  # only a block that is read again shows it
    logits[1, :190] = -1.0
    only_zero = torch.zeros(2), torch.zeros(2)
    assert [len(picked.rows) for _, picked in candidates.between(*only_zero)] == [10]
    logits.zero_()
    assert [len(picked.rows) for _, picked in candidates.between(*only_zero)] == [10]


def test_ordinals_count_the_flagged_entries_of_a_row():
    rows = torch.tensor([0, 0, 0, 2, 2, 3])
    flags = torch.tensor([True, False, True, False, True, True])
    assert c.ordinals(flags, rows, 4)[flags].tolist() == [0, 1, 0, 0]
    assert c.count_flags(flags, rows, 4).tolist() == [2, 0, 1, 1]
