"""Radix selection finds the same elements as a sort."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity_tests.parity import parity
from shardproof import CaseSpec, scheme
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel import topk_by_radix
from torch_impl.vocab_parallel.filter_bounds import Candidates, Limits, _entries_elsewhere
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions
from torch_impl.vocab_parallel.radix_selection import (
    LargestOnCpu,
    ListedWeights,
    float_of,
    last_kept,
    one_each,
    order_keys,
)
from torch_impl.vocab_parallel.topk_by_radix import _listed_above

WIDE_OUTPUTS = False
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_in_the_order_of_the_floats(dtype):
    info = torch.finfo(dtype)
    steps = [0.0, info.smallest_normal / 2, info.smallest_normal, 1.0 - info.eps / 2, 1.0, 1.0 + info.eps, info.max]
    ascending = torch.tensor([-math.inf, *(-x for x in steps[:0:-1]), *steps, math.inf], dtype=torch.float64).to(dtype)
    keys = order_keys(ascending)
    assert (keys.diff() > 0).all()
    assert torch.equal(float_of(keys, dtype), ascending)
    assert order_keys(torch.tensor(-0.0, dtype=dtype)) == order_keys(torch.tensor(0.0, dtype=dtype))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2), st.sampled_from(DTYPES))
def test_any_floats_are_ordered(values, dtype):
    floats = torch.tensor(values, dtype=torch.float64).to(dtype)
    for a, b in ((floats[:-1], floats[1:]), (floats, floats)):
        assert torch.equal(order_keys(a) < order_keys(b), a < b) and torch.equal(order_keys(a) == order_keys(b), a == b)


def by_sorting(row, weights, low, room):
    """(z, weight above z) by sorting: the smallest z >= low of positive weight with less than `room` above it."""
    keeps = [(z, weights[row > z].sum()) for z in np.unique(row[(row >= low) & (weights > 0)])]
    return min((z, above) for z, above in keeps if above < room)


def weight_of_logits(z):
    """Of equal logits the same, a small integer: every sum is exact."""
    return 1 + (z * 8).abs().floor().clamp(max=1e6).remainder(3)


def listed(columns, weigh):
    return ListedWeights(Candidates(columns, chunk_size=1), lambda _, entries: weigh(entries.logits))


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(["normal", "ties", "large", "flat"]),
    tp=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([1, 9, 700]),
    dtype=st.sampled_from(DTYPES),
)
def test_selection_equals_a_sort(seed, kind, tp, size, dtype):
    rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
    z = {
        "normal": rng.standard_normal((3, size)),
        "ties": np.rint(2 * rng.standard_normal((3, size))),
        "large": rng.standard_normal((3, size)) * 10.0 ** rng.uniform(-4, 4, (3, size)),
        "flat": np.full((3, size), -2.5),
    }[kind]
    rows, wide = torch.from_numpy(z).to(dtype), torch.promote_types(dtype, torch.float32)
    weights = weight_of_logits(rows.to(wide))
    room = torch.tensor([1.0, float(rng.integers(1, 2 * size + 1)), math.inf]).to(wide)
    low = torch.full_like(room, -math.inf)
    low[1] = rows[1].max()

    def body(mesh, case):
        columns = rows[:, torch.arange(size).tensor_split(tp)[mesh.rank("tp")]]
        weights_here = listed(columns, lambda z: weight_of_logits(z.to(wide)))
        return [x.double().numpy() for x in last_kept(weights_here, low, room, mesh["tp"])]

    for value, above in run(body, CaseSpec(scheme="radix", mesh={"tp": tp})).results:
        for i, row in enumerate(rows.double().numpy()):
            assert (value[i], above[i]) == by_sorting(row, weights[i].double().numpy(), float(low[i]), float(room[i]))


def of_a_partition(columns, k, low):
    return LargestOnCpu(columns, k, None), low


def of_lists(columns, k, low):
    """As on a GPU: each rank raises its lower bound."""
    low = low.clone()
    return ListedWeights(_listed_above(columns, k, None, low), one_each), low


@pytest.mark.parametrize("weights_of", [of_a_partition, of_lists])
@given(
    seed=st.integers(0, 2**16),
    size=st.sampled_from([2, 9, 700]),
    k=st.sampled_from([1, 3, 40, 900]),
    dtype=st.sampled_from(DTYPES),
)
def test_the_kth_largest_matches_a_sort(weights_of, seed, size, k, dtype):
    """NaN is no candidate; a masked logit is the last one."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 2]))
    rows = torch.from_numpy(np.rint(4 * rng.standard_normal((4, size))) / 2).to(dtype)
    rows[2, rng.integers(0, size)] = math.nan
    rows[3, rng.integers(0, size) :] = -math.inf
    low = torch.full((4,), -math.inf, dtype=torch.promote_types(dtype, torch.float32))

    def body(mesh, case):
        columns = rows[:, torch.arange(size).tensor_split(2)[mesh.rank("tp")]]
        weights, above = weights_of(columns, k, low)
        return last_kept(weights, above, torch.full_like(low, k), mesh["tp"])[0].double().numpy()

    in_order = [np.sort(row[~np.isnan(row)])[::-1] for row in rows.double().numpy()]
    expected = [row[min(k, len(row)) - 1] for row in in_order]
    for kth in run(body, CaseSpec(scheme="kth", mesh={"tp": 2})).results:
        # The partition counts a NaN as -inf, so row 2, which has fewer than k numbers, ends in one.
        assert all(a == b or (i == 2 and k >= size) for i, (a, b) in enumerate(zip(kth, expected, strict=True)))


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)])
def test_a_round_for_each_byte_and_none_without_a_group(dtype, rounds):
    row = torch.arange(8.0).view(1, 8).to(dtype)
    room = torch.tensor([3.0], dtype=torch.promote_types(dtype, torch.float32))
    low = torch.full_like(room, -math.inf)

    def counts():
        return listed(row, lambda z: torch.ones_like(z, dtype=room.dtype))

    def body(mesh, case):
        return last_kept(counts(), low, room, mesh["tp"])[0].item()

    ranks = run(body, CaseSpec(scheme="radix", mesh={"tp": 2}))
    assert ranks.results == (6.0, 6.0)  # 7, 7, 6, 6
    sent = [row.bytes_in for row in ranks.ledger.rows if row.rank == 0]
    assert sent == [256 * room.itemsize] * rounds
    alone, above = last_kept(counts(), low, room, None)
    assert (alone.item(), above.item()) == (5.0, 2.0)


ROW_SIZE = 20_000


@given(
    seed=st.integers(0, 2**16),
    spreads=st.sampled_from([(4.0, 6.0, 9.0), (1.0, 0.5, 2.0), (6.0, 1.0, 0.0)]),
    top_p=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
    temperature=st.sampled_from([1.0, 0.5]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=few(40))
def test_top_p_keeps_the_same_tokens_as_with_every_column_listed(seed, spreads, top_p, temperature, dtype):
    rng = np.random.Generator(np.random.Philox(key=[seed, 3]))
    z = rng.standard_normal((3, ROW_SIZE)) * np.array(spreads)[:, None]
    z[1, rng.random(ROW_SIZE) < 0.3] = -math.inf
    rows, options = torch.from_numpy(z).to(dtype), LogprobOptions(None, 0, ROW_SIZE, temperature)
    column, limits = torch.zeros(3, 1, dtype=torch.int32), Limits(None, top_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_by_radix, "TAIL", 2.0**1000)  # no column is as small as that
        every_column_listed, ties, _ = topk_by_radix.topk_by_radix(rows, column, options, limits)
    bounds, ties_of_few, _ = topk_by_radix.topk_by_radix(rows, column, options, limits)
    for a, b in zip(bounds, every_column_listed, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ties_of_few.counts, ties.counts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_thousands_of_equal_masses_are_summed_without_drift(ranks):
    """97,000 tokens of one probability; below the second bound are tokens of 1 - p and a little, so that some are kept.

    Summed in float32, one after the other, the 97,000 are off by more than that little.
    """
    equal, rare, p = 97_000, 4_000, 0.999
    tail = 1 - p + 5e-4
    rare_logit = math.log(tail / (1 - tail) * (1 + equal * math.exp(-3.15)) / rare)
    z = torch.cat([torch.zeros(1), torch.full((equal,), -3.15), torch.full((rare,), rare_logit)])[None]

    threshold, ties = bounds_where_every_column_is_listed_too(z, p, ranks)
    assert threshold == z[0, -1].item() and 0 < ties < rare


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_columns_that_cannot_be_kept_depend_on_all_ranks(ranks):
    """One token of 0.85 and 8,000 of 0.15 together: of all columns' flat share, half of 1 - p, each has three times."""
    rare, p = 8_000, 0.9
    z = torch.cat([torch.zeros(1), torch.full((rare,), math.log(0.15 / 0.85 / rare))])[None]
    threshold, ties = bounds_where_every_column_is_listed_too(z, p, ranks)
    assert threshold == z[0, -1].item() and 0 < ties < rare / 2


def bounds_where_every_column_is_listed_too(z, p, ranks):
    """Threshold of the only row's top-p and ties kept, the same on every rank and where no column is left out."""

    def body(mesh, case):
        start, end = (rank * z.shape[-1] // ranks for rank in (mesh.rank("tp"), mesh.rank("tp") + 1))
        options = LogprobOptions(mesh["tp"] if ranks > 1 else None, start, end)
        column = torch.full((1, 1), -1, dtype=torch.int32)
        bounds, _, _ = topk_by_radix.topk_by_radix(z[:, start:end], column, options, Limits(None, p))
        return [x.item() for x in bounds]

    results = run(body, CaseSpec(scheme="ties", mesh={"tp": ranks})).results
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_by_radix, "TAIL", 2.0**1000)
        assert results == run(body, CaseSpec(scheme="ties", mesh={"tp": ranks})).results
    return results[0][2:]


@pytest.mark.parametrize(("spread", "times"), [(5.0, 1), (1.0, 2)])
def test_flat_rows_alone_are_listed_again(monkeypatch, spread, times):
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((3, ROW_SIZE)) * spread)
    lists = []
    monkeypatch.setattr(topk_by_radix, "Candidates", lambda *args: lists.append(Candidates(*args)) or lists[-1])
    options, column = LogprobOptions(None, 0, ROW_SIZE, 1.0), torch.zeros(3, 1, dtype=torch.int32)
    topk_by_radix.topk_by_radix(rows, column, options, Limits(None, 0.9))
    assert len(lists) == times


# On other devices than a CPU the columns are listed by plain operations, which a CPU runs as well.


@scheme(
    reference=lambda logits, k: jnp.sort(logits, -1)[:, logits.shape[-1] - k],
    mesh={"dp": (1, 2)},
    inputs={"logits": "n/dp v"},
    outputs="n/dp",
    dims={"v": (16, 40, 9)},
    options={"k": (1, 2, 3, 5)},
    rank_options={"chunk_size": (None, 1, 2)},
    nograd=("logits",),
    dtypes=("float32", "bfloat16", "float64", "float16"),
)
def kth_largest_by_groups(mesh, logits, k, chunk_size):
    """The k-th largest is found among the columns that reach the k-th largest of the groups' maxima."""
    low = logits.new_full((len(logits),), -math.inf, dtype=accumulator(logits.dtype))
    weights = ListedWeights(_listed_above(logits[None], k, chunk_size, low), one_each)
    return last_kept(weights, low, torch.full_like(low, k), None)[0].to(logits.dtype)


@scheme(
    reference=lambda logits, low, high: jnp.where((logits >= low[:, None]) & (logits <= high[:, None]), logits, 0),
    mesh={"dp": (1, 2)},
    inputs={"logits": "n/dp v", "low": "n/dp", "high": "n/dp"},
    outputs="n/dp v",
    nograd=("logits", "low", "high"),
    dtypes=("float32", "bfloat16", "float64"),
)
def entries_between_bounds(mesh, logits, low, high):
    """Entries name the rows, the columns and the values of all elements between the bounds of their row."""
    rows, columns, chosen = _entries_elsewhere(logits, low, high)
    return torch.zeros_like(logits).index_put_((rows.long(), columns.long()), chosen)


test_parity_of_lists = pytest.mark.fast_values(1)(parity([kth_largest_by_groups, entries_between_bounds], lockstep=40))
