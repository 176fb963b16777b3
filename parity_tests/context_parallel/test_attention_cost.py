"""The bytes of context_parallel.attention_cost against what ranks are seen to send, and which exchange sends fewest."""

import doctest

import pytest
import torch

from parity_tests.harness.run.engines import run
from shardproof import CaseSpec
from torch_impl.context_parallel import attention_bytes, attention_cost, context_parallel_attention, fewest_bytes

SENT = {  # to others, of the payload that the ledger has, in a group of n
    "send": lambda payload, n: payload,
    "recv": lambda payload, n: 0,
    "all_gather": lambda payload, n: payload * (n - 1),
    "reduce_scatter": lambda payload, n: payload * (n - 1) // n,
    "all_to_all": lambda payload, n: payload * (n - 1) // n,
}


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
        tuple(
            sum(SENT[row.op](row.payload, len(row.group)) for row in ledger.of(rank) if row.phase == phase)
            for phase in ("fwd", "bwd")
        )
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
def test_bytes_are_those_that_ranks_send(shapes):
    rows = attention_bytes(**shapes)
    assert [traffic.exchange for traffic in rows][:2] == ["ring", "all_gather"]
    for traffic in rows:
        assert measured(traffic, shapes) == [(traffic.forward, traffic.backward)] * shapes["cp_size"], traffic


def exchanges(**shapes):
    defaults = dict(b=1, s=4096, h=32, hk=8, p=64, cp_size=8, itemsize=2)
    return [(traffic.exchange, traffic.heads_size) for traffic in attention_bytes(**{**defaults, **shapes})]


def test_what_divides_the_heads_and_the_layout():
    keys = [("ring", 1), ("all_gather", 1)]
    assert exchanges() == [*keys, ("usp", 2), ("usp", 4), ("ulysses", 8)]
    assert exchanges(h=12, hk=12) == [*keys, ("usp", 2), ("usp", 4)]
    assert exchanges(h=7, hk=7) == keys
    assert exchanges(layout="striped") == [*keys, ("ulysses", 8)]
    assert exchanges(layout="ragged") == [("all_gather", 1)]
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
    assert by_exchange[2]["ring"] == 2 * by_exchange[2]["ulysses"]


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
    assert [traffic.exchange for traffic in attention_bytes(s=7, cp_size=2, layout="ragged", **shapes)] == [
        "all_gather"
    ]
    assert all(traffic.total == 0 for traffic in attention_bytes(s=7, cp_size=1, **shapes))


def test_what_the_docstrings_show():
    assert doctest.testmod(attention_cost) == (0, 2)
