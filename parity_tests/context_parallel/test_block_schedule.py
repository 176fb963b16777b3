"""Attention over packed sequences, for every exchange and order; and which queries and keys a schedule pairs.

Triangles that are split into smaller ones give the same pairs and the same values.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_ref.context_parallel import packed_attention, seen_pairs
from jax_ref.layouts import packed
from parity_tests.context_parallel.attention_schemes import (
    DTYPES,
    HEADS,
    ROUNDINGS,
    RULES,
    SCALE,
    can_share_heads,
    exchange_cost,
    limits,
    packed_cost,
    rules,
    stream,
    usp_cost,
)
from parity_tests.context_parallel.seen_pairs import KINDS, streams, times_seen
from parity_tests.parity import parity
from shardproof import check_cases, offsets, scheme
from torch_impl.context_parallel import block_schedule, context_parallel_attention
from torch_impl.context_parallel.block_schedule import MAX_DISTINCT_LENGTHS, MAX_SEGMENT_QUERIES, Block, schedule_of
from torch_impl.context_parallel.blockwise_attention import RunningAttention, SoftmaxOptions
from torch_impl.layouts import TokenLayout


def by_rules(q, k, v, padded, real, causal, window):
    width = jnp.where(window[0] > 0, window[0] + 2, q.shape[2])
    return packed_attention(q, k, v, padded, real, causal[0] > 0, width, SCALE)


def declared(layout, ranks, exchanges, **sizes):
    cut = "s/cp" if layout == "contiguous" else f"s/cp:{layout}"
    return dict(
        reference=by_rules,
        mesh={"cp": ranks},
        inputs={
            "q": f"b h {cut} p",
            "k": f"b g {cut} p",
            "v": f"b g {cut} p",
            "padded": "n",
            "real": "n",
            "causal": "one",
            "window": "one",
        },
        outputs=f"b h {cut} p",
        dims={"b": (1,), "h": (12,), "g": (2,), "s": (48,), "p": (2,), "n": (5,), "one": (1,), **sizes},
        draw={**HEADS, **RULES, "padded": offsets("s", padded=True), "real": offsets("s")},
        rank_options={"exchange": exchanges},
        dtypes=DTYPES,
        reduction=("s", "p"),
        roundings=ROUNDINGS,
        cost=packed_cost(layout),
        assume=can_share_heads,
    )


def attention_of_stream(mesh, q, k, v, padded, real, causal, window, exchange, kind):
    stream = TokenLayout.packed(padded, real, cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"), kind=kind)
    return context_parallel_attention(
        q, k, v, group=mesh["cp"], layout=stream, cu_seqlens=padded, exchange=exchange, **rules(causal, window)
    )


@scheme(contract=context_parallel_attention, **declared("packed", (1, 2, 3, 4), ("ring", "all_gather")))
def packed_attention_by_keys(mesh, q, k, v, padded, real, causal, window, exchange):
    return attention_of_stream(mesh, q, k, v, padded, real, causal, window, exchange, "packed")


@scheme(contract=context_parallel_attention, **declared("packed", (1, 2, 4), ("ulysses",)))
def packed_attention_by_heads(mesh, q, k, v, padded, real, causal, window, exchange):
    return attention_of_stream(mesh, q, k, v, padded, real, causal, window, exchange, "packed")


@scheme(contract=context_parallel_attention, **declared("striped", (1, 2, 4), ("ring", "all_gather", "ulysses")))
def packed_attention_in_stripes(mesh, q, k, v, padded, real, causal, window, exchange):
    return attention_of_stream(mesh, q, k, v, padded, real, causal, window, exchange, "striped")


@scheme(contract=context_parallel_attention, **declared("contiguous", (1, 2, 4), ("ring", "all_gather", "ulysses")))
def packed_attention_in_order(mesh, q, k, v, padded, real, causal, window, exchange):
    return attention_of_stream(mesh, q, k, v, padded, real, causal, window, exchange, "contiguous")


def without_padding(q, k, v, padded, causal, window):
    return by_rules(q, k, v, padded, padded, causal, window)


def by_name(layout):
    """The declaration of a scheme without real lengths."""

    def cost(c, padded, causal, window):
        return exchange_cost(c, stream(layout, c.s, c.cp, padded), limits(causal, window), padded)

    fields = declared(layout, (1, 2, 4), ("ring", "all_gather"), n=(4,))
    names = [name for name in fields["inputs"] if name != "real"]
    draws = {name: draw for name, draw in fields["draw"].items() if name != "real"}
    inputs = {name: fields["inputs"][name] for name in names}
    return {**fields, "reference": without_padding, "inputs": inputs, "draw": draws, "cost": cost}


def attention_by_name(mesh, q, k, v, padded, causal, window, exchange, order):
    """Offsets and the name of an order in place of a layout."""
    call = dict(layout=order, cu_seqlens=padded, exchange=exchange, **rules(causal, window))
    return context_parallel_attention(q, k, v, group=mesh["cp"], **call)


@scheme(contract=context_parallel_attention, **by_name("packed"))
def packed_attention_by_name(mesh, q, k, v, padded, causal, window, exchange):
    return attention_by_name(mesh, q, k, v, padded, causal, window, exchange, "dual_chunk_swap")


@scheme(contract=context_parallel_attention, **by_name("contiguous"))
def packed_attention_in_order_by_name(mesh, q, k, v, padded, causal, window, exchange):
    return attention_by_name(mesh, q, k, v, padded, causal, window, exchange, "contiguous")


@scheme(contract=context_parallel_attention, **by_name("striped"))
def packed_attention_in_stripes_by_name(mesh, q, k, v, padded, causal, window, exchange):
    return attention_by_name(mesh, q, k, v, padded, causal, window, exchange, "striped")


MANY = declared("packed", (1, 2), ("ring", "ulysses"), h=(2,), g=(1,), s=(160,), n=(15,))


@scheme(contract=context_parallel_attention, **MANY)
def packed_attention_of_many_lengths(mesh, q, k, v, padded, real, causal, window, exchange):
    return attention_of_stream(mesh, q, k, v, padded, real, causal, window, exchange, "packed")


DOCUMENTS = np.array([0, 8, 8, 32, 48])
WRITTEN = np.array([0, 6, 6, 30, 31])


def documents(size, world):
    """The packed layout of these documents, or of a rank's share of them."""
    return packed(size, world, DOCUMENTS * size // DOCUMENTS[-1])


def documents_reference(q, k, v, causal, window):
    return by_rules(q, k, v, jnp.array(DOCUMENTS), jnp.array(WRITTEN), causal, window)


@scheme(
    reference=documents_reference,
    mesh={"ring": (1, 2), "heads": (1, 2)},
    layouts={"documents": documents},
    contract=context_parallel_attention,
    inputs={
        **{
            name: f"b {heads} s/ring:documents/heads:documents p"
            for name, heads in (("q", "h"), ("k", "g"), ("v", "g"))
        },
        "causal": "one",
        "window": "one",
    },
    outputs="b h s/ring:documents/heads:documents p",
    dims={"b": (1,), "h": (12,), "g": (2,), "s": (48,), "p": (2,), "one": (1,)},
    draw={**HEADS, **RULES},
    dtypes=DTYPES,
    reduction=("s", "p"),
    roundings=ROUNDINGS,
    cost=lambda c, causal, window: usp_cost(c, causal, window, documents(c.s, c.ring), DOCUMENTS, WRITTEN),
)
def packed_attention_over_two_axes(mesh, q, k, v, causal, window):
    ring, heads = mesh.size("ring"), mesh.size("heads")
    rank = mesh.rank("ring") * heads + mesh.rank("heads")
    stream = TokenLayout.packed(DOCUMENTS.tolist(), WRITTEN.tolist(), cp_size=ring * heads, cp_rank=rank)
    return context_parallel_attention(
        q, k, v, mesh=mesh.device_mesh, layout=stream, exchange="usp", **rules(causal, window)
    )


SCHEMES = (
    packed_attention_of_many_lengths,
    packed_attention_over_two_axes,
    packed_attention_by_keys,
    packed_attention_by_heads,
    packed_attention_in_stripes,
    packed_attention_in_order,
    packed_attention_by_name,
    packed_attention_in_order_by_name,
    packed_attention_in_stripes_by_name,
)
test_parity = parity(SCHEMES, lockstep=30)


test_parity_on_processes = parity((packed_attention_by_keys, packed_attention_in_order), gloo=5)


LENGTHS = {
    "one": [24],
    "with an empty one": [8, 0, 16, 8],
    "of many lengths": [8 * length for length in (1, 9, 2, 17, 3, 5, 4, 6, 7, 11, 13, 33)],
    "many": [8, 16, 8] * 50,
}


@pytest.mark.fast_values(6)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_every_pair_meets_once_on_one_rank(name, kind, causal, window):
    layouts = streams(LENGTHS[name], kind, 4)
    full = layouts[0]
    places = [x.numpy() for x in (full.sequence_ids, full.position_ids, ~full.padding_mask)]
    expected = np.asarray(seen_pairs(*places, causal, window))
    np.testing.assert_array_equal(sum(times_seen(layout, causal, window) for layout in layouts), expected)


LONG = {"one": [2400], "several": [1200, 0, 8, 1232], "alike": [800, 800, 800]}


@pytest.mark.fast_values(6)
@pytest.mark.parametrize(
    "window",
    [None, 3, MAX_SEGMENT_QUERIES - 1, MAX_SEGMENT_QUERIES, MAX_SEGMENT_QUERIES + 44, 2 * MAX_SEGMENT_QUERIES + 3],
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "dual_chunk_swap", "ragged"])
@pytest.mark.parametrize("name", LONG)
def test_every_pair_of_long_sequences_meets_once(name, kind, causal, window):
    """Long sequences are split into runs and small triangles; the last rank computes the right pairs, each once."""
    if kind in KINDS:
        layout = streams(LONG[name], kind, 2)[1]
    else:
        layout = TokenLayout.dense(kind, sum(LONG[name]), cp_size=2, cp_rank=1, real_length=2400)
    places = [x.numpy() for x in (layout.sequence_ids, layout.position_ids, ~layout.padding_mask)]
    expected = np.asarray(seen_pairs(*places, causal, window)).copy()
    expected[np.setdiff1d(np.arange(layout.total), layout.local_index.numpy())] = False
    # Not assert_array_equal: its message would take longer than the blocks.
    assert np.array_equal(times_seen(layout, causal, window), expected)


def area(blocks):
    """The number of pairs that blocks compute, and the bytes of their masks; a mask that blocks share counts once."""
    masks = {block.mask.data_ptr(): block.mask.numel() for block in blocks if block.mask is not None}
    pairs = sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in blocks)
    return pairs, sum(masks.values())


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("window", [16, 300, 1000])
@pytest.mark.parametrize("kind", ["contiguous", "dual_chunk_swap", "striped"])
def test_a_window_costs_its_width_for_each_token(kind, window):
    def measured(length):
        layout = TokenLayout.dense(kind, length, cp_size=2, cp_rank=0)
        return area([block for rank_blocks in schedule_of(layout, True, window).blocks for block in rank_blocks])

    (short, few), (long, many) = measured(8192), measured(32768)
    assert long <= 32768 * (window + 2 * MAX_SEGMENT_QUERIES) and long <= 5 * short
    assert many <= 12 * MAX_SEGMENT_QUERIES * MAX_SEGMENT_QUERIES and many <= 2 * few


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_that_sees_all_equals_no_window(kind, causal):
    for lengths, window in (([24], 24), ([8, 16, 8], 15)):  # the last of 16 tokens is padding
        layout = streams(lengths, kind, 2)[0]
        wide, unlimited = (schedule_of(layout, causal, span).blocks for span in (window, None))
        for limited, expected in zip(wide, unlimited, strict=True):
            assert [(b.is_causal, b.mask is None) for b in limited] == [(b.is_causal, b.mask is None) for b in expected]


def test_a_long_sequence_among_short_ones_has_its_own_block():
    layout = TokenLayout.packed(np.cumsum([0, 1025, 3, 4, 5, 6, 7, 8, 9, 10]).tolist(), cp_size=1, cp_rank=0)
    (blocks,) = schedule_of(layout, True, None).blocks
    longest = max(blocks, key=lambda block: block.keys.stop - block.keys.start if type(block.keys) is slice else 0)
    assert (longest.queries, longest.keys, longest.is_causal) == (slice(0, 1025), slice(0, 1025), True)
    assert len(blocks) < MAX_DISTINCT_LENGTHS and longest.is_query is None


def test_without_a_window_no_mask_is_made():
    for kind in KINDS:
        for layout in streams(LENGTHS["many"], kind, 4):
            blocks = [block for rank_blocks in schedule_of(layout, True, None).blocks for block in rank_blocks]
            assert not any(block.mask is not None for block in blocks)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_do_not_grow_with_the_sequences(kind, causal):
    """There is one block for each length; if many lengths differ, there are fewer blocks than lengths."""

    def calls(lengths):
        return [len(blocks) for blocks in schedule_of(streams(lengths, kind, 2)[1], causal, None).blocks]

    assert max(calls([4, 16, 8, 8] * 300)) <= 4
    assert max(calls([4 * length for length in range(1, 120)])) <= 3 * MAX_DISTINCT_LENGTHS


def test_each_shape_is_looked_up_once():
    layout = streams([8, 16], "packed", 2)[0]
    assert schedule_of(layout, True, None) is schedule_of(layout, True, None)
    assert schedule_of(layout, True, 3) is not schedule_of(layout, True, None)


def test_dual_chunk_swap_gives_every_rank_the_same_work():
    def work(rank):
        blocks = schedule_of(TokenLayout.dense("dual_chunk_swap", 48, cp_size=4, cp_rank=rank), True, None).blocks
        sizes = [(b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for (b,) in blocks]
        return sorted(sizes)

    assert [work(rank) for rank in range(4)] == [[72, 72, 72, 144]] * 4


def test_a_block_without_keys_is_rejected_before_it_ends_the_process():
    q, keys = torch.zeros(1, 1, 2, 4), torch.zeros(2, 1, 1, 0, 4)
    with pytest.raises(RuntimeError) as caught:
        RunningAttention(q).add(q, keys, Block(slice(0, 2), slice(0, 2)), SoftmaxOptions(1.0))
    sentence = "context_parallel.block_schedule: a block has queries and no keys; leave it out of the schedule"
    assert str(caught.value) == sentence


@pytest.fixture
def small_triangles(monkeypatch):
    """Triangles of two queries are split, so that short sequences have some."""
    monkeypatch.setattr(block_schedule, "MIN_TRIANGLE_QUERIES", 2)


@pytest.mark.fast_values(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LENGTHS)
def test_every_pair_meets_once_in_split_triangles(name, kind, small_triangles):
    layouts = streams(LENGTHS[name], kind, 2)
    full = layouts[0]
    places = [x.numpy() for x in (full.sequence_ids, full.position_ids, ~full.padding_mask)]
    expected = np.asarray(seen_pairs(*places, True, None))
    np.testing.assert_array_equal(sum(times_seen(layout, True, None) for layout in layouts), expected)


@pytest.mark.slow
def test_parity_of_split_triangles(small_triangles):
    check_cases(packed_attention_of_many_lengths, 20)
