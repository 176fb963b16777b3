"""Keys are sent to the ranks whose documents need them, and to no other: which rows, and by which route."""

import doctest

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ref.context_parallel import packed_attention
from jax_ref.layouts import contiguous
from parity_tests.context_parallel.attention_schemes import DTYPES, ROUNDINGS, stream
from parity_tests.context_parallel.attention_schemes import HEADS as HEADS_DRAWN
from shardproof import CaseSpec, check_cases, scheme
from shardproof.cost.attention import (
    around_the_ring,
    as_a_halo,
    cheaper,
    key_costs,
    needed_keys,
    visible_pairs,
)
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.context_parallel import context_parallel_attention, key_routes, key_traffic
from torch_impl.context_parallel.needed_keys import needed_rows
from torch_impl.layouts import TokenLayout

N = 4
HEADS = dict(q=4, k=2, v=2)


def stacked(lengths):
    return np.cumsum([0, *lengths])


@st.composite
def documents(draw):
    """Padded and real lengths of some documents, some of them empty, that fill a stream of a multiple of 2 * N."""
    kind = draw(st.sampled_from(["contiguous", "striped", "packed"]))
    unit = 2 * N if kind == "packed" else 1
    padded = [unit * length for length in draw(st.lists(st.integers(0, 40 // unit), min_size=1, max_size=5))]
    padded += [-sum(padded) % (2 * N)]
    real = [draw(st.integers(0, length)) for length in padded]
    return kind, padded, real, draw(st.booleans()), draw(st.sampled_from([None, 1, 2, 3, 7, 20]))


@settings(max_examples=few(60))
@given(documents())
def test_needed_rows_belong_to_pairs_that_meet(drawn):
    kind, padded, real, causal, window = drawn
    offsets, sums = stacked(padded), stacked(real)
    positions = stream(kind, sum(padded), N, offsets)
    expected = needed_keys(positions, visible_pairs(sum(padded), causal, window, offsets, sums))
    layout = TokenLayout.packed(offsets.tolist(), sums.tolist(), cp_size=N, cp_rank=1, kind=kind)
    needed = needed_rows(layout, causal, window).numpy()
    for r in range(N):
        for s in range(N):
            assert set(positions[s][needed[r, s]]) == expected[r][s]
    chosen, other = key_traffic(layout, causal=causal, window=window)
    messages = {"ring": ("send", around_the_ring(expected)), "halo": ("all_to_all", as_a_halo(expected))}
    for traffic in (chosen, other):
        op, sent = messages[traffic.route]
        assert traffic.keys == tuple(table.get(op, (0, 0))[1] for table in sent.keys)
        assert traffic.gradients == tuple(table.get(op, (0, 0))[1] for table in sent.gradients)
    assert (chosen.route == "ring") == ("all_to_all" not in cheaper(expected).keys[0])


LENGTHS = {1: [32], 3: [12, 8, 12]}


def of_documents(q, k, v, causal, window, documents):
    offsets = jnp.array(stacked(LENGTHS[documents]))
    return packed_attention(q, k, v, offsets, offsets, causal, window)


def halo_cost(c):
    visible = visible_pairs(c.s, c.causal, c.window, stacked(LENGTHS[c.documents]))
    return key_costs(c, contiguous(c.s, c.cp), visible, c.g)


@scheme(
    reference=of_documents,
    mesh={"cp": (4,)},
    contract=context_parallel_attention,
    inputs={"q": "b h s/cp p", "k": "b g s/cp p", "v": "b g s/cp p"},
    outputs="b h s/cp p",
    dims={"b": (1,), "h": (4,), "g": (2,), "s": (32,), "p": (4,)},
    draw=HEADS_DRAWN,
    options={"causal": (False, True), "window": (11,), "documents": (1, 3)},
    dtypes=DTYPES,
    reduction=("s", "p"),
    roundings=ROUNDINGS,
    cost=halo_cost,
)
def attention_over_a_halo(mesh, q, k, v, causal, window, documents):
    """All but one of these take the halo: a window that reaches two ranks, or documents that reach both neighbours."""
    rank = dict(cp_size=mesh.size("cp"), cp_rank=mesh.rank("cp"), kind="contiguous")
    layout = TokenLayout.packed(stacked(LENGTHS[documents]).tolist(), **rank)
    return context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout, causal=causal, window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "examples"), [("lockstep", 20), ("gloo", 4)])
def test_parity_over_a_halo(engine, examples):
    check_cases(attention_over_a_halo, examples, engine=engine)


def attended(lengths, **rules):
    """The ledger of attention over documents of these lengths, forward and backward."""

    def body(mesh, case):
        layout = TokenLayout.packed(stacked(lengths).tolist(), cp_size=N, cp_rank=mesh.rank("cp"), kind="contiguous")
        shards = [torch.ones(1, h, layout.counts[0], 4, requires_grad=True) for h in HEADS.values()]
        context_parallel_attention(*shards, group=mesh["cp"], layout=layout, **rules).sum().backward()

    return run(body, CaseSpec(scheme="documents", mesh={"cp": N})).ledger


@pytest.mark.parametrize("causal", [True, False])
def test_documents_that_stay_on_their_rank_send_nothing(causal):
    assert attended([8, 8, 8, 8], causal=causal).rows == []
    assert attended([3, 5, 8, 0, 8, 1, 7], causal=causal).rows == []
    assert attended([32], causal=causal, window=1).rows == []


def test_one_document_goes_around_the_ring_as_far_as_it_is_seen():
    """Of contiguous rows a causal document never goes from the last rank on to the first."""
    ledger = attended([32])
    row = 2 * 2 * 4 * 4
    for rank in range(N):
        sent = [(r.op, r.payload // row, r.phase) for r in ledger.of(rank) if r.op == "send"]
        keys = (rank + 1) * (rank < N - 1)
        assert sent == [("send", 8, "fwd")] * keys + [("send", 8, "bwd")] * (keys + rank)


@pytest.mark.parametrize(
    ("lengths", "rules", "route"),
    [
        ([32], {}, "ring"),
        ([8] * 4, {}, "ring"),  # without a message
        ([16, 16], {}, "ring"),
        ([6, 10, 16], {}, "ring"),
        ([24, 8], {}, "halo"),  # the last rank has no message before step 1
        ([16, 16], {"causal": False}, "halo"),
        ([12, 8, 12], {"causal": False}, "halo"),
        ([32], {"window": 3}, "ring"),
        ([32], {"window": 11}, "halo"),  # ten rows instead of twice eight
        ([32], {"window": 3, "causal": False}, "halo"),
    ],
)
def test_the_route_of_documents(lengths, rules, route):
    layout = TokenLayout.packed(stacked(lengths).tolist(), cp_size=N, cp_rank=0, kind="contiguous")
    assert key_traffic(layout, **rules)[0].route == route


def test_documents_over_all_ranks_go_around_the_ring():
    """Padding alone, by which a halo would send a few rows less, is no reason to leave it."""
    padded, real = stacked([16, 32, 8, 24]).tolist(), stacked([13, 27, 5, 20]).tolist()
    layout = TokenLayout.packed(padded, real, cp_size=N, cp_rank=0)
    ring, halo = key_traffic(layout)
    assert (ring.route, halo.route) == ("ring", "halo") and halo.peak_rows < ring.peak_rows


def test_a_second_derivative_over_a_halo_is_rejected():
    def body(mesh, case):
        layout = TokenLayout.packed([0, 12, 20, 32], cp_size=N, cp_rank=mesh.rank("cp"), kind="contiguous")
        shards = [torch.ones(1, h, 8, 4, requires_grad=True) for h in HEADS.values()]
        out = context_parallel_attention(*shards, group=mesh["cp"], layout=layout, causal=False)
        gradients = torch.autograd.grad(out.square().sum(), shards, create_graph=True)
        with pytest.raises(RuntimeError, match="_BlockwiseAttention: its gradient cannot be differentiated again"):
            sum(x.square().sum() for x in gradients).backward()

    run(body, CaseSpec(scheme="documents", mesh={"cp": N}))


OF_ROUTES = {
    "halo": (32, N, {"window": 11}, {7: 8, 15: 11, 16: 11}),  # on three ranks; these see 11 keys
    # Two on rank 0, in two kernel calls: its triangle of 2048 rows is split.
    "all_gather": (4096, 2, {"exchange": "all_gather"}, {7: 8, 1535: 1536, 3071: 3072}),
}


@pytest.mark.parametrize(("length", "cp", "options", "keys_of"), OF_ROUTES.values(), ids=OF_ROUTES)
def test_gradients_of_keys_are_summed_in_float32(length, cp, options, keys_of):
    """256 of one query and 1 of each of two others: bfloat16 has 258, and loses a 1 beside 256."""
    shares = dict(zip(keys_of, (256.0, 1.0, 1.0), strict=True))

    def body(mesh, case):
        layout = TokenLayout.dense("contiguous", length, cp_size=cp, cp_rank=mesh.rank("cp"))
        q, k, v = (torch.zeros(1, 1, length // cp, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = context_parallel_attention(q, k, v, group=mesh["cp"], layout=layout, **options)
        every = torch.zeros(1, 1, length, 4, dtype=out.dtype)
        for query, share in shares.items():
            every[:, :, query] = share * keys_of[query]  # each key that it sees has an equal part
        return torch.autograd.grad(out, v, layout.shard(every, 2))[0][0, 0, 7].tolist()

    first, *_ = run(body, CaseSpec(scheme="documents", mesh={"cp": cp})).results
    assert first == [258.0] * 4


def test_layers_share_a_route():
    layout = TokenLayout.dense("contiguous", 16, cp_size=2, cp_rank=0)
    assert key_routes.key_transfer(layout, True, 3) is key_routes.key_transfer(layout, True, 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"layout": "contiguous"}, TypeError, "layout is a str; pass a TokenLayout"),
        ({"causal": None}, TypeError, "causal=None is None; pass True or False"),
        ({"window": 0}, ValueError, "window=0 must be at least 1, or None to see all"),
    ],
)
def test_rejections(arguments, kind, message):
    layout = TokenLayout.dense("contiguous", 8, cp_size=2, cp_rank=0)
    with pytest.raises(kind) as caught:
        key_traffic(**{"layout": layout, **arguments})
    assert str(caught.value) == f"context_parallel.key_traffic: {message}"


def test_the_docstrings_examples():
    assert doctest.testmod(key_routes) == (0, 4)
