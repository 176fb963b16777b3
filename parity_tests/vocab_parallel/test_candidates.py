"""Lists of columns between bounds that close in."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_impl.vocab_parallel import filter_bounds as c


def within(candidates, low, high, rows):
    """Flat places of listed values within the bounds; each list is checked to be in order and true."""
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


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    shape=st.sampled_from([(1, 300), (5, 9), (3, 0), (0, 4)]),
)
def test_lists_on_a_cpu_match_other_devices(seed, dtype, shape):
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(shape, generator=generator).mul(2).round().to(dtype)
    block = torch.where(torch.rand(shape, generator=generator) < 0.1, torch.nan, block)
    block = torch.where(torch.rand(shape, generator=generator) < 0.1, -torch.inf, block)
    bounds = (
        torch.randn(2, len(block), generator=generator).mul(2).round().to(torch.promote_types(dtype, torch.float32))
    )
    bounds = torch.where(
        torch.rand(bounds.shape, generator=generator) < 0.3, torch.tensor([[-torch.inf], [torch.inf]]), bounds
    )
    parts = [entries._replace(rows=entries.rows + part.start) for part, entries in c._entries_between(block, *bounds)]
    for each, elsewhere in zip(zip(*parts, strict=True), c._entries_elsewhere(block, *bounds), strict=True):
        ours = torch.cat(each)
        assert torch.equal(ours, elsewhere) and ours.dtype == elsewhere.dtype


@given(seed=st.integers(0, 2**16), dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_long_rows_keep_the_same_values_as_short_ones(seed, dtype):
    """Tied, infinite and NaN logits, and rows whose ties stay up to any column."""
    generator, width = torch.Generator().manual_seed(seed), c.long_rows.MIN_COLUMNS
    block = torch.randn(4, width, generator=generator).mul(4).round().to(dtype)
    block[:, ::7], block[:, 1::11], block[1, 5], block[2, 3] = -torch.inf, 0.0, torch.nan, torch.inf
    threshold = block[:, 8].to(torch.promote_types(dtype, torch.float32))
    last_tie = torch.randint(-1, width + 1, (4,), generator=generator, dtype=torch.int32)
    for ties in (None, last_tie):
        halves = [block[:, : width // 2], block[:, width // 2 :]]
        short = [
            c.keep_first(half, threshold, None if ties is None else ties - start)
            for half, start in zip(halves, (0, width // 2), strict=True)
        ]
        kept = c.keep_first(block, threshold, ties)
        assert torch.equal(kept.isnan(), block.isnan())
        assert torch.equal(kept.nan_to_num(9.0), torch.cat(short, dim=-1).to(kept.dtype).nan_to_num(9.0))


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
