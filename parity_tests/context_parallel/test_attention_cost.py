"""The bytes that context_parallel.attention_cost predicts against the bytes sent, and which exchange sends fewest."""

import doctest
import itertools

import pytest
import torch

import jax_ref.layouts
from shardproof import CaseSpec
from shardproof.cost.attention import around_the_ring, as_a_halo, cheaper, needed_keys, visible_pairs
from shardproof.engines.engines import run
from torch_impl.context_parallel import attention_bytes, attention_cost, context_parallel_attention, fewest_bytes
from torch_impl.context_parallel.key_routes import key_traffic
from torch_impl.layouts import TokenLayout


def sent_to_others(row):
    """Bytes of a row of the ledger that leave its rank."""
    n, own = len(row.group), row.group.index(row.rank)
    if row.op == "all_to_all":
        rows = row.splits[0]
        return row.payload * (sum(rows) - rows[own]) // max(sum(rows), 1)
    shares = {"send": 1, "recv": 0, "all_gather": n - 1, "reduce_scatter": (n - 1) / n}
    return int(row.payload * shares[row.op])


def measured(traffic, shapes):
    """Bytes that each rank sent, forward and backward."""
    n, a = shapes["cp_size"], traffic.heads_size
    mesh = {"ring": n // a, "heads": a} if traffic.exchange == "usp" else {"cp": n}

    def body(mesh, case):
        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shapes["itemsize"]]
        heads = (shapes["h"], shapes["hk"], shapes["hk"])
        rows = shapes["s"] // n
        shards = [torch.zeros(shapes["b"], h, rows, shapes["p"], dtype=dtype, requires_grad=True) for h in heads]
        rules = {name: shapes[name] for name in ("layout", "window", "causal") if name in shapes}
        out = context_parallel_attention(
            *shards, mesh=mesh.device_mesh, exchange=traffic.exchange, **{"layout": "dual_chunk_swap", **rules}
        )
        out.backward(torch.ones_like(out))

    ledger = run(body, CaseSpec(scheme="context_parallel", mesh=mesh)).ledger
    return [
        tuple(sum(sent_to_others(row) for row in ledger.of(rank) if row.phase == phase) for phase in ("fwd", "bwd"))
        for rank in range(n)
    ]


SHAPES = [
    dict(b=2, s=16, h=8, hk=2, p=4, cp_size=4, itemsize=2),
    dict(b=1, s=24, h=4, hk=4, p=8, cp_size=4, itemsize=8),
    dict(b=1, s=12, h=6, hk=1, p=2, cp_size=3, itemsize=4),
    dict(b=1, s=16, h=4, hk=1, p=2, cp_size=4, itemsize=4, layout="contiguous", window=5),
    dict(b=1, s=16, h=4, hk=1, p=2, cp_size=4, itemsize=4, layout="contiguous", window=6),
    dict(b=1, s=16, h=4, hk=1, p=2, cp_size=4, itemsize=4, layout="contiguous", window=1),
    dict(b=1, s=16, h=4, hk=1, p=2, cp_size=4, itemsize=4, layout="contiguous", window=99),
    dict(b=1, s=16, h=4, hk=1, p=2, cp_size=4, itemsize=4, layout="contiguous", window=5, causal=False),
    dict(b=1, s=16, h=4, hk=4, p=2, cp_size=4, itemsize=4, layout="striped", window=2),
    dict(b=1, s=5, h=4, hk=4, p=2, cp_size=1, itemsize=4),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=lambda shapes: "-".join(map(str, shapes.values())))
def test_bytes_match_the_ranks_messages(shapes):
    rows = attention_bytes(**shapes)
    assert [traffic.exchange for traffic in rows][:2] == ["ring", "all_gather"]
    for traffic in rows:
        assert tuple(map(max, zip(*measured(traffic, shapes), strict=True))) == (traffic.forward, traffic.backward)


REJECTION = "rejected"
PREDICTED = [
    *SHAPES,
    *(
        dict(b=2, s=s, h=h, hk=hk, p=3, cp_size=n, itemsize=itemsize, **rules)
        for n, s in ((2, 8), (4, 16), (6, 24), (8, 32))
        for h, hk, itemsize in ((8, 8, 2), (24, 4, 4), (12, 3, 8), (6, 1, 2))
        for rules in ({}, {"layout": "striped"}, {"layout": "contiguous", "window": 3}, {"layout": "packed"})
    ),
    *(
        dict(b=1, s=32, h=8, hk=hk, p=2, cp_size=8, itemsize=2, layout="contiguous", window=window, causal=causal)
        for hk in (1, 8)
        for window in (1, 2, 4, 5, 9, 10, 18)
        for causal in (True, False)
    ),
    dict(b=1, s=7, h=4, hk=2, p=2, cp_size=3, itemsize=2, layout="ragged"),
    dict(b=1, s=7, h=4, hk=2, p=2, cp_size=1, itemsize=2),
    *({**SHAPES[0], **wrong} for wrong in ({"hk": 3}, {"s": 18}, {"s": 18, "layout": "packed"}, {"s": 0})),
    {**SHAPES[0], "s": 7, "cp_size": 2},
]


def key_rows(shapes, ranks):
    """Rows of keys, and of sums of their gradients, that each rank of a ring sends, message by message."""
    s, layout = shapes["s"], shapes.get("layout", "dual_chunk_swap") if ranks > 1 else "contiguous"
    positions = getattr(jax_ref.layouts, "dual_chunk_swap" if layout == "packed" else layout)(s, ranks)
    visible = visible_pairs(s, shapes.get("causal", True), shapes.get("window"))
    sent = cheaper(needed_keys(positions, visible))
    return [
        [sum(rows for op, (_, rows) in table.items() if op != "recv") for table in of] for of in vars(sent).values()
    ]


def numbers_sent(shapes, kind, a):
    """The most that one rank sends, forward; backward: messages of keys, each one by one, and pieces of heads."""
    b, h, hk, p, n = (shapes[name] for name in ("b", "h", "hk", "p", "cp_size"))
    e, rows = shapes["itemsize"], -(-shapes["s"] // n)
    gradient = e if e > 4 else 4
    row = 2 * b * p * (hk if a == 1 else max(hk, a) // a)
    if kind == "ulysses":
        keys, sums = [0], [0]
    else:
        keys, sums = key_rows(shapes, n // a) if kind != "all_gather" else [[(n - 1) * rows]] * 2
    # q and the output once each, k and v with as many heads as ranks at least; one of a pieces stays.
    pieces = [b * rows * p * heads // a for heads in (h, h, max(hk, a), max(hk, a)) for _ in range(a - 1)]
    backward = max(row * (of_rank * e + summed * gradient) for of_rank, summed in zip(keys, sums, strict=True))
    return row * max(keys) * e + sum(pieces) * e, backward + sum(pieces) * e


def expected_ways(shapes):
    """(exchange, ranks that share heads, bytes forward, bytes backward) of each way; and the way that sends fewest."""
    h, hk, n, layout = shapes["h"], shapes["hk"], shapes["cp_size"], shapes.get("layout", "dual_chunk_swap")
    unit = n * {"ragged": 0, "dual_chunk_swap": 2, "packed": 2}.get(layout, 1)
    if h % hk or shapes["s"] < 1 or (n > 1 and unit and shapes["s"] % unit):
        return REJECTION
    if layout == "ragged":
        ways = [("ring", 1), ("all_gather", 1)]
    else:
        shared = [a for a in range(1, n + 1) if not n % a and not h % a and 0 in (hk % a, a % hk)]
        between = [("usp", a) for a in shared if 1 < a < n and layout != "striped"]
        ways = [("ring", 1), ("all_gather", 1), *between, *[("ulysses", n)] * (n in shared)]
    found = [(kind, a, *numbers_sent(shapes, kind, a)) for kind, a in ways]
    return found, min(found, key=lambda way: sum(way[2:]))


def reported_ways(shapes):
    def of(way):
        return way.exchange, way.heads_size, way.forward, way.backward

    try:
        return [of(way) for way in attention_bytes(**shapes)], of(fewest_bytes(**shapes))
    except ValueError:
        return REJECTION


@pytest.mark.parametrize("shapes", PREDICTED, ids=lambda shapes: "-".join(map(str, shapes.values())))
def test_bytes_match_each_message(shapes):
    assert reported_ways(shapes) == expected_ways(shapes)


RANKS = 4
DOCUMENTS = {"one": (0, 32), "of a share": (0, 8, 16, 24, 32), "over shares": (0, 5, 20, 32)}


def expected_routes(documents, kind, causal, window):
    """(route, rows of keys, rows of gradients that each rank sends) of both routes, the one that is taken first."""
    offsets = DOCUMENTS[documents]
    visible = visible_pairs(offsets[-1], causal is not False, window, offsets)
    needed = needed_keys(getattr(jax_ref.layouts, kind)(offsets[-1], RANKS), visible)
    ways = [("ring", "send", around_the_ring(needed)), ("halo", "all_to_all", as_a_halo(needed))]
    if not any("send" in table for table in cheaper(needed).keys) and any(map(any, needed)):
        ways.reverse()

    def rows(tables, op):
        return [table.get(op, (0, 0))[1] for table in tables]

    return [(route, rows(sent.keys, op), rows(sent.gradients, op)) for route, op, sent in ways]


@pytest.mark.parametrize(
    ("documents", "kind", "causal", "window"),
    list(itertools.product(DOCUMENTS, ("contiguous", "striped"), (None, True, False), (None, 3, 9))),
)
def test_rows_of_keys_by_route(documents, kind, causal, window):
    """With None an argument is left out."""
    layout = TokenLayout.packed(DOCUMENTS[documents], cp_size=RANKS, cp_rank=0, kind=kind)
    rules = {name: x for name, x in (("causal", causal), ("window", window)) if x is not None}
    found = [(way.route, list(way.keys), list(way.gradients)) for way in key_traffic(layout, **rules)]
    assert found == expected_routes(documents, kind, causal, window)


def exchanges(**shapes):
    defaults = dict(b=1, s=4096, h=32, hk=8, p=64, cp_size=8, itemsize=2)
    return [(traffic.exchange, traffic.heads_size) for traffic in attention_bytes(**{**defaults, **shapes})]


def test_exchanges_that_fit_the_heads_and_the_layout():
    keys = [("ring", 1), ("all_gather", 1)]
    assert exchanges() == [*keys, ("usp", 2), ("usp", 4), ("ulysses", 8)]
    assert exchanges(h=12, hk=12) == [*keys, ("usp", 2), ("usp", 4)]
    assert exchanges(h=7, hk=7) == keys
    assert exchanges(layout="striped") == [*keys, ("ulysses", 8)]
    assert exchanges(layout="ragged") == keys
    assert exchanges(s=4104, hk=3, h=6, cp_size=6) == [*keys, ("usp", 3), ("ulysses", 6)]


def test_fewest():
    """Few KV heads are cheap to pass on; heads exchanged cost less the more ranks there are; a window is a halo."""
    shapes = dict(b=1, s=65536, h=64, p=128, itemsize=2)
    assert fewest_bytes(hk=1, cp_size=2, **shapes).exchange == "ring"
    assert fewest_bytes(hk=64, cp_size=8, **shapes).exchange == "ulysses"
    assert fewest_bytes(hk=16, cp_size=8, layout="contiguous", window=1024, **shapes).exchange == "ring"
    assert fewest_bytes(hk=8, cp_size=1, **shapes).total == 0


def test_the_exchange_of_heads_shrinks_with_the_ranks_and_the_ring_does_not():
    shapes = dict(b=1, s=65536, h=64, hk=64, p=128, itemsize=2)
    by_exchange = {
        n: {traffic.exchange: traffic.total for traffic in attention_bytes(cp_size=n, **shapes)} for n in (2, 4, 8, 16)
    }
    for n in (2, 4, 8):
        assert by_exchange[2 * n]["ring"] > by_exchange[n]["ring"]
        assert by_exchange[2 * n]["ulysses"] < by_exchange[n]["ulysses"]
    # Without the causal rule every rank sends all of its keys; with it, the last chunk is seen by its own rank alone.
    seen_by_all = {traffic.exchange: traffic.total for traffic in attention_bytes(cp_size=2, causal=False, **shapes)}
    assert seen_by_all["ring"] == 2 * seen_by_all["ulysses"] > by_exchange[2]["ring"]


@pytest.mark.parametrize("function", [attention_bytes, fewest_bytes])
@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"p": 0}, ValueError, "p=0 must be at least 1"),
        ({"h": 6, "hk": 4}, ValueError, "h=6 query heads cannot share hk=4 KV heads (needs a multiple)"),
        ({"window": 0}, ValueError, "window=0 must be at least 1, or None to see all"),
        ({"window": -9}, ValueError, "window=-9 must be at least 1, or None to see all"),
        ({"window": 2.5}, TypeError, "window=2.5 is a float; pass an int, or None to see all"),
        ({"causal": None}, TypeError, "causal=None is None; pass True or False"),
        ({"s": 8.5}, TypeError, "s=8.5 is a float; pass an int"),
        ({"cp_size": True}, TypeError, "cp_size=True is a bool; pass an int"),
        (
            {"layout": "zigzag"},
            ValueError,
            "layout='zigzag' is not one of contiguous, dual_chunk_swap, packed, ragged, striped",
        ),
        ({"s": 6}, ValueError, "s=6 cannot be sharded by dual_chunk_swap over cp=2 (needs a multiple of 4); pad to 8"),
        (
            {"s": 7, "layout": "striped"},
            ValueError,
            "s=7 cannot be sharded by striped over cp=2 (needs a multiple of 2); pad to 8",
        ),
    ],
)
def test_rejections(wrong, kind, message, function):
    with pytest.raises(kind) as caught:
        function(**{**dict(b=1, s=8, h=4, hk=4, p=2, cp_size=2, itemsize=4), **wrong})
    assert str(caught.value) == f"context_parallel.attention_bytes: {message}"


def test_ragged_rows_and_one_rank_take_any_length():
    shapes = dict(b=1, h=4, hk=4, p=2, itemsize=4)
    assert [x.exchange for x in attention_bytes(s=7, cp_size=2, layout="ragged", **shapes)] == ["ring", "all_gather"]
    assert all(traffic.total == 0 for traffic in attention_bytes(s=7, cp_size=1, **shapes))


def test_the_docstrings_examples():
    assert doctest.testmod(attention_cost) == (0, 2)
